"""A choice's output and its channel: however sends are cut, repeated or lost, readers get each token once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.request import SequenceStats, TokenDelta
from sluice.protocol.states import JobState
from sluice.protocol.wire import ChannelEntry, End, decode_entry
from sluice.worker.jobs.channel import CHECKPOINT_TOKENS, MAX_ENTRY_TOKENS, ChannelLost, ChannelOutput
from sluice.worker.jobs.reader_waits import ReaderWaits

STATS = SequenceStats(num_prompt_tokens=1)


def delta(start: int, *token_ids: int, text: str = "") -> TokenDelta:
    return TokenDelta(request_id="r", choice=0, start=start, token_ids=token_ids, text=text, stats=STATS)


def output_of(words: list[str]) -> ChannelOutput:
    """One token a word, each visible at once."""
    output = ChannelOutput()
    for number, word in enumerate(words):
        output.extend(delta(number, number, text=word), now_s=number / 100, now_ms=1000 + 10 * number)
    return output


class Channel:
    """A channel as the server keeps it: refuses what does not begin where it ends."""

    def __init__(self) -> None:
        self.entries: list[ChannelEntry] = []
        self.offset = 0

    def append(self, entry: ChannelEntry) -> int | None:
        """None, or the offset to send from."""
        if entry.start != self.offset:
            return self.offset
        self.entries.append(entry)
        self.offset += len(entry.token_ids)
        return None


class TestGivenAnyHistoryOfSendsAndLosses:
    """Words come, sends happen at any time, replies are lost, and Redis may lose its last entries."""

    @given(st.lists(st.tuples(st.text(max_size=3), st.sampled_from(["", "send", "lost reply", "redis lost some"]))))
    def test_when_all_is_sent_then_the_channel_has_each_token_and_its_text_once(
        self, history: list[tuple[str, str]]
    ) -> None:
        output, channel = ChannelOutput(), Channel()
        for number, (word, event) in enumerate(history):
            output.extend(delta(number, number, text=word), now_s=float(number), now_ms=number)
            if event == "redis lost some" and channel.entries:
                channel.offset -= len(channel.entries.pop().token_ids)
            if event:
                send(output, channel, reply_is_lost=event == "lost reply")
        send(output, channel)

        assert [one for entry in channel.entries for one in entry.token_ids] == list(range(len(history)))
        assert "".join(entry.text for entry in channel.entries) == "".join(word for word, _ in history)

    @given(st.lists(st.text(max_size=3), min_size=1), st.integers(0, 50))
    def test_when_resumed_from_its_channel_then_it_goes_on_as_if_nothing_had_happened(
        self, words: list[str], cut: int
    ) -> None:
        cut = min(cut, len(words))
        before, channel = output_of(words[:cut]), Channel()
        send(before, channel)

        after = ChannelOutput(published=cut)
        for entry in channel.entries:
            after.replay(entry)
        for number in range(cut, len(words)):
            after.extend(delta(number, number, text=words[number]), now_s=0.0, now_ms=0)
        send(after, channel)

        assert after.token_ids == list(range(len(words)))
        assert after.text == "".join(words)
        assert "".join(entry.text for entry in channel.entries) == "".join(words)


def send(output: ChannelOutput, channel: Channel, *, reply_is_lost: bool = False) -> None:
    """Send until the channel has it all, as the exchange does."""
    for _ in range(3):
        if not output.has_updates and output.published == channel.offset:
            return
        entry = decode_entry(output.encode_next())
        elsewhere = channel.append(entry)
        if reply_is_lost:
            return
        output.acknowledge(entry.offset if elsewhere is None else elsewhere, has_end=False, now_s=0.0)


class TestGivenAChannelThatLostItsMiddle:
    """Published were 6 tokens; the channel has the first 2."""

    def test_when_generated_again_then_only_what_was_not_published_is_sent(self) -> None:
        output = ChannelOutput(published=6)
        output.replay(ChannelEntry(start=0, token_ids=(0, 1), text="ab", time_ms=1))

        for number in range(2, 8):
            output.extend(delta(number, number, text="cdefgh"[number - 2]), now_s=0.0, now_ms=0)

        entry = decode_entry(output.encode_next())
        assert (entry.start, entry.token_ids, entry.text) == (6, (6, 7), "gh")

    def test_when_it_ends_before_what_was_published_then_the_job_fails(self) -> None:
        output = ChannelOutput(published=6)
        output.extend(delta(0, 0, 1, text="ab"), now_s=0.0, now_ms=0)

        output.finish(End(state=JobState.DONE, finish_reason="stop"), now_ms=1)

        assert output.end is not None
        assert output.end.state is JobState.FAILED
        assert output.end.error_code == "channel_lost"
        assert decode_entry(output.encode_end(output.end)).start == 6

    def test_when_an_entry_is_missing_then_reading_stops_there(self) -> None:
        output = ChannelOutput(published=6)
        output.replay(ChannelEntry(start=0, token_ids=(0,), text="a", time_ms=1))

        with pytest.raises(ChannelLost, match="channel lost at 1"):
            output.replay(ChannelEntry(start=2, token_ids=(2,), text="c", time_ms=1))


class TestGivenAJobThatNobodyStreams:
    """stream=false: checkpoints only."""

    def test_when_tokens_come_then_an_entry_is_due_after_64_of_them_or_a_second(self) -> None:
        output = ChannelOutput()
        due: list[bool] = []
        for number in range(CHECKPOINT_TOKENS + 1):
            output.extend(delta(number, number), now_s=0.0, now_ms=0)
            due.append(output.reach_checkpoint(0.0))

        assert due.index(True) == CHECKPOINT_TOKENS - 1
        output.acknowledge(CHECKPOINT_TOKENS + 1, has_end=False, now_s=0.0)
        assert not output.reach_checkpoint(0.5)
        assert output.reach_checkpoint(1.0)

    def test_when_jobs_began_at_different_times_then_their_checkpoints_are_the_same(self) -> None:
        outputs = [ChannelOutput(), ChannelOutput()]
        for output, first_s in zip(outputs, (7.1, 7.8), strict=True):
            output.extend(delta(0, 0), now_s=first_s, now_ms=0)
            assert not output.reach_checkpoint(first_s)

        for now_s, is_due in ((7.9, False), (8.0, True), (8.9, False), (9.1, True)):
            assert [output.reach_checkpoint(now_s) for output in outputs] == [is_due] * 2

    def test_when_it_ends_then_the_end_is_due_at_once(self) -> None:
        output = output_of(["a"])
        output.finish(End(state=JobState.DONE), now_ms=1)

        assert output.reach_checkpoint(0.0)


class TestGivenGapsBetweenTokens:
    """Times of tokens become ITL."""

    def test_when_a_job_is_resumed_then_the_takeover_is_a_gap_of_its_readers(self) -> None:
        output = ChannelOutput(published=2)
        output.replay(ChannelEntry(start=0, token_ids=(0,), text="a", time_ms=1000))
        output.replay(ChannelEntry(start=1, token_ids=(1,), text="b", time_ms=1010))
        output.extend(delta(2, 2), now_s=500.0, now_ms=4230)
        output.extend(delta(3, 3), now_s=500.02, now_ms=4250)

        assert [round(gap, 3) for gap in output.gaps_ms] == [10.0, 3220.0, 20.0]


class TestGivenReadersOfTokens:
    """What they see is the time between two entries."""

    def test_when_redis_was_away_then_the_late_entry_is_their_gap(self) -> None:
        output = ChannelOutput()
        for number in range(100):
            output.extend(delta(number, number), now_s=number / 100, now_ms=0)
            if number in (0, 1):
                output.acknowledge(number + 1, has_end=False, now_s=number / 100)

        assert output.longest_gap_ms(5.01) == pytest.approx(5000)
        output.acknowledge(100, has_end=False, now_s=5.01)
        output.acknowledge(100, has_end=True, now_s=9.0)

        assert output.longest_gap_ms(9.0) == pytest.approx(5000)
        assert max(output.gaps_ms) == pytest.approx(10)

    def test_when_nobody_streams_then_they_wait_from_a_checkpoint_on(self) -> None:
        output = ChannelOutput(waits=ReaderWaits(is_streamed=False))
        for number in range(4):
            output.extend(delta(number, number), now_s=float(number), now_ms=0)
            if output.reach_checkpoint(float(number)):
                output.acknowledge(number + 1, has_end=False, now_s=number + 0.25)

        assert output.waits.longest_s == pytest.approx(0.25)
        assert output.longest_gap_ms(4.0) == pytest.approx(1000)

    def test_when_an_earlier_attempt_had_an_outage_then_its_entries_show_it(self) -> None:
        output = ChannelOutput(published=41)
        output.replay(ChannelEntry(start=0, token_ids=(0,), text="a", time_ms=1000))
        output.replay(ChannelEntry(start=1, token_ids=tuple(range(40)), text="b", time_ms=5000))

        assert output.waits.earlier_s == 4.0
        assert output.longest_gap_ms(0.0) is None

    def test_when_a_takeover_and_an_outage_meet_then_they_are_one_gap(self) -> None:
        output = ChannelOutput(published=1)
        output.replay(ChannelEntry(start=0, token_ids=(0,), text="a", time_ms=1000))
        output.extend(delta(1, 1), now_s=500.0, now_ms=4000)

        output.acknowledge(2, has_end=False, now_s=502.0)

        assert output.waits.longest_s == pytest.approx(5.0)


class TestGivenMoreTokensThanAnEntryTakes:
    """Redis was away for long; the choice has even ended."""

    def test_when_sent_then_it_is_published_in_several_entries_and_the_end_comes_last(self) -> None:
        num_tokens = 2 * MAX_ENTRY_TOKENS + 10
        output, channel = output_of(["x"] * num_tokens), Channel()
        end = End(state=JobState.DONE)
        output.finish(end, now_ms=1)
        was_last: list[bool] = []

        while output.published < num_tokens:
            was_last.append(output.fits_an_entry)
            entry = decode_entry(output.encode_next())
            assert channel.append(entry) is None
            output.acknowledge(entry.offset, has_end=False, now_s=0.0)

        assert was_last == [False, False, True]
        assert [len(entry.text) for entry in channel.entries] == [MAX_ENTRY_TOKENS, MAX_ENTRY_TOKENS, 10]
        assert decode_entry(output.encode_end(end)).start == num_tokens

    @pytest.mark.parametrize("size", [1, 3, 25])
    def test_when_steps_have_several_tokens_then_each_entry_has_whole_steps(self, size: int) -> None:
        output, channel = ChannelOutput(), Channel()
        for number in range(5 * MAX_ENTRY_TOKENS // (2 * size)):
            token_ids = range(number * size, (number + 1) * size)
            output.extend(delta(token_ids[0], *token_ids, text="x" * size), now_s=0.0, now_ms=0)

        while output.has_updates:
            entry = decode_entry(output.encode_next())
            assert (len(entry.token_ids), len(entry.text)) == (output.num_next_tokens,) * 2
            assert channel.append(entry) is None
            output.acknowledge(entry.offset, has_end=False, now_s=0.0)

        assert len(channel.entries) == 3

    def test_when_none_of_them_has_text_then_they_are_published_all_the_same(self) -> None:
        output, channel = ChannelOutput(), Channel()
        output.extend(delta(0, *range(MAX_ENTRY_TOKENS)), now_s=0.0, now_ms=0)
        output.extend(delta(MAX_ENTRY_TOKENS, *range(10), text="late"), now_s=0.0, now_ms=0)

        for _ in range(2):
            entry = decode_entry(output.encode_next())
            assert channel.append(entry) is None
            output.acknowledge(entry.offset, has_end=False, now_s=0.0)

        assert [(len(entry.token_ids), entry.text) for entry in channel.entries] == [(2048, ""), (10, "late")]
