"""Results and records: what is kept of a job when it ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.contract import limits
from producer.contract.calls import LeasedJob
from producer.contract.keys import QueueKeys
from producer.contract.states import JobState
from producer.contract.wire import End, JobId, JobSpec, TokenLogprobs, decode_entry, decode_record, decode_result
from worker.advance import calls_of, news_of
from worker.channel import ChannelOutput
from worker.leases import HeldJob
from worker.results import JobMeasures, Origin, percentile, result_of

ORIGIN = Origin(model="m", fingerprint="f", worker="w")


def job_of(*choices: ChannelOutput) -> HeldJob:
    leased = LeasedJob(
        id=JobId("0.t.abc"), epoch=1, attempt=1, priority=0, spec=b"", payload=b"", seed=1, choices=len(choices),
        submitted_ms=0, pulled_ms=0, deadline_ms=None, prompt_tokens=1, published=(0,) * len(choices),
        ended=(False,) * len(choices), fingerprint=None, was_reclaimed=False, fits=True,
    )  # fmt: skip
    return HeldJob(leased=leased, keys=QueueKeys("q"), spec=JobSpec(), choices=list(choices), is_admitted=True)


def choice(num_tokens: int, *, ends: JobState | None = None) -> ChannelOutput:
    made = ChannelOutput(token_ids=list(range(num_tokens)), pieces=[(i + 1, "x") for i in range(num_tokens)])
    if ends is not None:
        made.finish(End(state=ends, finish_reason="length" if ends is JobState.DONE else None), now_ms=5)
    return made


class TestGivenAJobThatEndsWithItsLastStep:
    def test_when_told_to_the_queue_then_tokens_and_end_are_one_progress_so_that_no_crash_can_part_them(self) -> None:
        (said,) = news_of(job_of(choice(3, ends=JobState.DONE)), ORIGIN)

        assert said.progress.num_tokens == 3
        assert decode_entry(said.progress.entry).token_ids == (0, 1, 2)
        assert said.progress.end is not None


class TestGivenAJobWithChoices:
    def test_when_one_ends_and_another_runs_then_it_carries_no_result(self) -> None:
        first, second = news_of(job_of(choice(3, ends=JobState.DONE), choice(2)), ORIGIN)

        assert first.progress.end is not None
        assert first.progress.end.result is None
        assert second.progress.end is None

    def test_when_one_is_done_and_another_expired_then_the_record_has_no_finish_reason_of_the_first(self) -> None:
        said = list(news_of(job_of(choice(3, ends=JobState.DONE), choice(2, ends=JobState.EXPIRED)), ORIGIN))

        for one in said:
            assert one.progress.end is not None
            assert (one.progress.end.state, one.progress.end.reason) == ("expired", None)
            assert decode_record(one.progress.end.record or b"").finish_reason is None

    def test_when_all_have_ended_then_each_end_carries_the_whole_result(self) -> None:
        said = list(news_of(job_of(choice(3, ends=JobState.DONE), choice(2, ends=JobState.DONE)), ORIGIN))

        for one in said:
            assert one.progress.end is not None
            assert one.progress.end.result is not None
            result = decode_result(one.progress.end.result)
            assert [made.text for made in result.choices] == ["xxx", "xx"]
            assert result.usage.output_tokens == one.progress.end.output_tokens == 5
            assert decode_record(one.progress.end.record).output_tokens == 5

    def test_when_one_of_them_failed_then_the_job_has(self) -> None:
        failed = choice(1)
        failed.finish(End(state=JobState.FAILED, error="no", error_code="engine_error"), now_ms=5)

        said = list(news_of(job_of(failed, choice(2, ends=JobState.DONE)), ORIGIN))

        ends = [one.progress.end for one in said if one.progress.end]
        assert [(end.state, end.error_code) for end in ends] == [(JobState.FAILED, "engine_error")] * 2
        own = [decode_entry(end.entry).end for end in ends if end.entry]
        assert [end.state for end in own if end] == [JobState.FAILED, JobState.DONE]


class TestGivenAResultAtItsBound:
    def test_when_log_probabilities_exceed_it_then_they_are_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "MAX_RESULT_BYTES", 500)
        made = choice(10, ends=JobState.DONE)
        made.logprobs = [TokenLogprobs(chosen=-1.0, top=((1, -1.0),) * 10)] * 10

        encoded = result_of(ORIGIN, JobMeasures(prompt_tokens=1), [made])

        assert encoded is not None
        kept = decode_result(encoded).choices[0]
        assert (kept.text, kept.logprobs) == ("x" * 10, None)

    @pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.FAILED])
    def test_when_the_text_of_a_job_that_is_not_done_exceeds_it_then_its_end_stands(
        self, monkeypatch: pytest.MonkeyPatch, state: JobState
    ) -> None:
        monkeypatch.setattr(limits, "MAX_RESULT_BYTES", 5)

        (said,) = news_of(job_of(choice(10, ends=state)), ORIGIN)

        assert said.progress.end is not None
        assert (said.progress.end.state, said.progress.end.result) == (state, None)
        assert said.large_result is None


class TestGivenMoreNewsThanACallTakes:
    @given(st.lists(st.integers(0, 30), min_size=1, max_size=600))
    def test_when_cut_into_calls_then_all_is_said_once_in_order(self, lengths: list[int]) -> None:
        said = [one for length in lengths for one in news_of(job_of(choice(length + 1)), ORIGIN)]

        calls = list(calls_of(said))

        assert [one for call in calls for one in call] == said
        assert all(0 < len(call) <= 256 for call in calls)

    def test_when_one_is_larger_than_a_call_then_it_travels_alone(self) -> None:
        large = choice(1)
        large.pieces = [(1, "x" * 2**21)]
        said = [one for made in (choice(1), large, choice(1)) for one in news_of(job_of(made), ORIGIN)]

        assert [len(call) for call in calls_of(said)] == [1, 1, 1]


class TestGivenGaps:
    @given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
    def test_when_ranked_then_enough_are_not_above_and_enough_not_below(self, gaps: list[float], part: float) -> None:
        value = percentile(sorted(gaps), part)

        assert value in gaps
        assert sum(gap <= value for gap in gaps) >= part * len(gaps) - 1e-6
        assert sum(gap >= value for gap in gaps) >= (1 - part) * len(gaps) - 1e-6

    def test_when_there_are_none_then_there_is_no_percentile(self) -> None:
        assert percentile([], 0.5) is None
