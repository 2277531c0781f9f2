"""Results and records: what is kept of a job when it ends."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine import request
from sluice.engine.request import SequenceStats, TokenDelta
from sluice.protocol import limits
from sluice.protocol.calls import AdvanceAnswer, Already, EndCall, LeasedJob, Ok, Progress, SendFrom
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.protocol.wire import (
    ChannelEntry,
    End,
    JobId,
    JobRecord,
    JobSpec,
    TokenLogprobs,
    decode_entry,
    decode_record,
    decode_result,
)
from sluice.worker.jobs import progress
from sluice.worker.jobs.channel import ChannelOutput
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.leases import Leases
from sluice.worker.jobs.progress import Update, batches_of, move_large_results, pending_updates
from sluice.worker.jobs.results import Origin, percentile, result_of

ORIGIN = Origin(model="m", fingerprint="f", worker="w")


def job_of(*choices: ChannelOutput) -> HeldJob:
    leased = LeasedJob(
        id=JobId("0.t.abc"), epoch=1, attempt=1, priority=0, spec=b"", payload=b"", seed=1, choices=len(choices),
        submitted_ms=0, pulled_ms=0, deadline_ms=None, prompt_tokens=1, published=(0,) * len(choices),
        ended=(False,) * len(choices), fingerprint=None, fits=True,
    )  # fmt: skip
    job = Leases().new_job(leased, QueueKeys("q"), JobSpec())
    for index, output in enumerate(choices):
        job.restore(index, output)
    job.admit()
    return job


def updates_of(*choices: ChannelOutput) -> list[Update]:
    """What a job of each choice alone has to publish."""
    jobs = [job_of(one) for one in choices]
    return [(job, update) for job in jobs for update in pending_updates(job, ORIGIN, now_s=0.0)]


def choice(num_tokens: int, *, ends: JobState | None = None) -> ChannelOutput:
    made = ChannelOutput(token_ids=list(range(num_tokens)), pieces=[(i + 1, "x") for i in range(num_tokens)])
    if ends is not None:
        made.finish(End(state=ends, finish_reason="length" if ends is JobState.DONE else None), now_ms=5)
    return made


class TestGivenAJobThatEndsWithItsLastStep:
    def test_when_published_then_tokens_and_end_are_in_one_progress_update(self) -> None:
        (update,) = pending_updates(job_of(choice(3, ends=JobState.DONE)), ORIGIN, now_s=0.0)

        assert update.num_tokens == 3
        assert decode_entry(update.entry).token_ids == (0, 1, 2)
        assert update.end is not None


class TestGivenAJobWithChoices:
    def test_when_one_ends_and_another_runs_then_it_carries_no_result(self) -> None:
        first, second = pending_updates(job_of(choice(3, ends=JobState.DONE), choice(2)), ORIGIN, now_s=0.0)

        assert first.end is not None
        assert first.end.result is None
        assert second.end is None

    def test_when_one_is_done_and_another_expired_then_the_record_has_no_finish_reason(self) -> None:
        updates = list(
            pending_updates(job_of(choice(3, ends=JobState.DONE), choice(2, ends=JobState.EXPIRED)), ORIGIN, now_s=0.0)
        )

        for one in updates:
            assert one.end is not None
            assert (one.end.state, one.end.reason) == ("expired", None)
            assert decode_record(one.end.record or b"").finish_reason is None

    def test_when_all_have_ended_then_the_last_end_carries_the_whole_result(self) -> None:
        updates = list(
            pending_updates(job_of(choice(3, ends=JobState.DONE), choice(2, ends=JobState.DONE)), ORIGIN, now_s=0.0)
        )

        first, last = [one.end for one in updates if one.end]
        assert (first.result, first.output_tokens) == (None, last.output_tokens)
        result = decode_result(last.result or b"")
        assert [made.text for made in result.choices] == ["xxx", "xx"]
        assert result.usage.output_tokens == last.output_tokens == 5
        assert [decode_record(end.record).output_tokens for end in (first, last)] == [5, 5]

    def test_when_many_end_at_once_then_the_result_is_encoded_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[bytes | None] = []

        def counting(*of_job: Any) -> bytes | None:
            made.append(result_of(*of_job))
            return made[-1]

        monkeypatch.setattr(progress, "result_of", counting)

        updates = list(pending_updates(job_of(*[choice(1, ends=JobState.DONE)] * 64), ORIGIN, now_s=0.0))

        assert [one.end.result for one in updates if one.end] == [None] * 63 + made

    def test_when_a_failed_one_asks_for_a_retry_then_its_end_carries_the_result(self) -> None:
        failed = choice(1)
        failed.finish(End(state=JobState.FAILED, error="no", error_code="engine_error"), now_ms=5)

        first, last = pending_updates(job_of(failed, choice(2, ends=JobState.DONE)), ORIGIN, now_s=0.0)

        assert first.end is not None
        assert last.end is not None
        assert first.end.result == last.end.result is not None

    def test_when_one_of_them_failed_then_the_job_has(self) -> None:
        failed = choice(1)
        failed.finish(End(state=JobState.FAILED, error="no", error_code="engine_error"), now_ms=5)

        updates = list(pending_updates(job_of(failed, choice(2, ends=JobState.DONE)), ORIGIN, now_s=0.0))

        ends = [one.end for one in updates if one.end]
        assert [(end.state, end.error_code) for end in ends] == [(JobState.FAILED, "engine_error")] * 2
        own = [decode_entry(end.entry).end for end in ends]
        assert [end.state for end in own if end] == [JobState.FAILED, JobState.DONE]


class Queue:
    """What the scripts do with the updates of one job."""

    def __init__(self, num_choices: int) -> None:
        self.offsets = [0] * num_choices
        self.ended = [False] * num_choices
        self.end: EndCall | None = None

    def take(self, one: Progress) -> AdvanceAnswer:
        if self.end is not None or self.ended[one.choice]:
            return Already()
        if one.start != self.offsets[one.choice]:
            return SendFrom(self.offsets[one.choice])
        self.offsets[one.choice] += one.num_tokens
        self.ended[one.choice] = one.end is not None
        self.end = one.end if all(self.ended) else None
        return Ok()

    def lose(self, choice: int) -> None:
        """Go back to before the last writes of a choice."""
        if self.end is None:
            self.offsets[choice], self.ended[choice] = 0, False


class TestGivenChoicesThatEndWhileAnswersAreLost:
    @given(
        st.lists(
            st.lists(st.sampled_from(["answered", "lost", "refused", "forgotten"]), min_size=4, max_size=4), max_size=6
        ),
        st.lists(st.integers(0, 5), min_size=4, max_size=4),
    )
    def test_when_the_queue_takes_the_last_end_then_it_has_the_whole_result(
        self, rounds: list[list[str]], ending_rounds: list[int]
    ) -> None:
        job, queue = job_of(*map(choice, (1, 2, 3, 4))), Queue(4)

        for number, fates in enumerate([*rounds, *[["answered"] * 4] * 12]):
            for made, ending in zip(job.choices, ending_rounds, strict=True):
                if ending == number:
                    made.finish(End(state=JobState.DONE, finish_reason="length"), now_ms=5)
            updates = list(pending_updates(job, ORIGIN, now_s=0.0))
            answers = [queue.take(one) for one in updates if fates[one.choice] != "refused"]
            taken = [one for one in updates if fates[one.choice] != "refused"]
            for one, answer in zip(taken, answers, strict=True):
                self._read(job, one, answer, fates[one.choice])
            if "forgotten" in fates:
                queue.lose(fates.index("forgotten"))
            if job.is_finished:
                break

        if queue.end is None:
            assert any("forgotten" in fates for fates in rounds), "such a job is leased again"
            return
        assert [one.text for one in decode_result(queue.end.result or b"").choices] == ["x", "xx", "xxx", "xxxx"]

    @staticmethod
    def _read(job: HeldJob, one: Progress, answer: AdvanceAnswer, fate: str) -> None:
        if fate == "lost":
            return
        if isinstance(answer, SendFrom):
            job.resend_from(one.choice, answer.offset)
        else:
            job.acknowledge(one, now_s=0.0)


class TestGivenAJobThatAnOlderWorkerBegan:
    def test_when_this_one_ends_it_then_the_result_has_the_tokens_of_both(self) -> None:
        old, new = TokenLogprobs(chosen=-1.0, top=((1, -1.0),)), TokenLogprobs(chosen=-2.0, token=b"b", offset=1)
        made = ChannelOutput()
        made.replay(ChannelEntry(start=0, token_ids=(0,), text="a", time_ms=1, logprobs=(old,)))
        delta = TokenDelta("r", 0, 1, (1,), "b", SequenceStats(num_prompt_tokens=1), (drawn(new),))
        made.extend(delta, now_s=1.0, now_ms=2)
        made.finish(End(state=JobState.DONE, finish_reason="length"), now_ms=3)

        encoded = result_of(ORIGIN, JobRecord(), [made])

        assert encoded is not None
        # One id has the same bytes wherever it is.
        seen = replace(old, top_tokens=(b"b",))
        assert decode_result(encoded).choices[0].logprobs == (seen, new)
        assert decode_entry(made.encode_next()).logprobs == (seen, new)


def drawn(one: TokenLogprobs) -> request.SampledLogprobs:
    """The same, as the engine says it."""
    return request.SampledLogprobs(chosen=one.chosen, top=one.top, token=one.token, offset=one.offset)


class TestGivenAResultAtItsBound:
    def test_when_log_probabilities_exceed_it_then_they_are_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "MAX_RESULT_BYTES", 500)
        made = choice(10, ends=JobState.DONE)
        made.logprobs = [TokenLogprobs(chosen=-1.0, top=((1, -1.0),) * 10)] * 10

        encoded = result_of(ORIGIN, JobRecord(), [made])

        assert encoded is not None
        kept = decode_result(encoded).choices[0]
        assert (kept.text, kept.logprobs) == ("x" * 10, None)

    @pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.FAILED])
    def test_when_the_text_of_a_job_that_is_not_done_exceeds_it_then_its_end_stands(
        self, monkeypatch: pytest.MonkeyPatch, state: JobState
    ) -> None:
        monkeypatch.setattr(limits, "MAX_RESULT_BYTES", 5)

        job = job_of(choice(10, ends=state))
        (update,) = pending_updates(job, ORIGIN, now_s=0.0)

        assert update.end is not None
        assert (update.end.state, update.end.result) == (state, None)
        assert move_large_results([(job, update)]) == ([(job, update)], [])


class TestGivenMoreNewsThanACallTakes:
    @given(st.lists(st.integers(0, 30), min_size=1, max_size=600))
    def test_when_cut_into_calls_then_all_is_said_once_in_order(self, lengths: list[int]) -> None:
        updates = updates_of(*(choice(length + 1) for length in lengths))

        batches = list(batches_of(updates))

        assert [one for batch in batches for one in batch] == updates
        assert all(0 < len(batch) <= 256 for batch in batches)

    def test_when_they_are_first_tokens_and_ends_then_a_call_has_fewer(self) -> None:
        updates = [one for _ in range(100) for one in updates_of(choice(1), choice(1, ends=JobState.DONE))]

        batches = list(batches_of(updates))

        assert [len(batch) for batch in batches] == [64, 64, 64, 8]
        assert [one for batch in batches for one in batch] == updates

    def test_when_one_is_larger_than_a_call_then_it_travels_alone(self) -> None:
        large = choice(1)
        large.pieces = [(1, "x" * 2**21)]
        updates = updates_of(choice(1), large, choice(1))

        assert [len(batch) for batch in batches_of(updates)] == [1, 1, 1]


class TestGivenAResultLargerThanAPart:
    def test_when_it_is_taken_out_then_each_end_names_its_length_and_it_is_there_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(progress, "PART_BYTES", 4)
        job = job_of(choice(3, ends=JobState.DONE), choice(2, ends=JobState.DONE))
        whole = [one.end.result for one in pending_updates(job, ORIGIN, now_s=0.0) if one.end]

        updates, results = move_large_results([(job, one) for one in pending_updates(job, ORIGIN, now_s=0.0)])

        assert results == [(job, whole[1])]
        ends = [one.end for _, one in updates if one.end]
        # No answer to the first call is known, so the queue may have any of its ends.
        assert [(end.result, end.result_bytes) for end in ends] == [(None, len(whole[1] or b""))] * 2
        assert b"".join(part for _, part in progress.parts_of(results[0][1])) == whole[1]


class TestGivenGaps:
    @given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
    def test_when_ranked_then_enough_are_not_above_and_enough_not_below(self, gaps: list[float], part: float) -> None:
        value = percentile(sorted(gaps), part)

        assert value in gaps
        assert sum(gap <= value for gap in gaps) >= part * len(gaps) - 1e-6
        assert sum(gap >= value for gap in gaps) >= (1 - part) * len(gaps) - 1e-6

    def test_when_there_are_none_then_there_is_no_percentile(self) -> None:
        assert percentile([], 0.5) is None
