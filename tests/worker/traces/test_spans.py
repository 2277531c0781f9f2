"""The spans of a job are a function of its rows: they tile its time, and show each attempt."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.history.tables import attempts, jobs
from sluice.worker.traces.spans import JobSpan, Row, spans_of

NOON_MS = 1_800_000_000_000
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def job(**columns: object) -> Row:
    """A job that was done in one attempt: 40 ms queued, 10 pulled, 50 prefill, 880 decode, 20 publish."""
    usual: dict[str, object] = {
        "id": "0.acme.00001", "submitted_ms": NOON_MS, "state": "done", "reason": "stop", "tenant": "acme",
        "queue": "q", "model": "tiny", "prompt_tokens": 11, "output_tokens": 20, "cached_tokens": 4, "choices": 1,
        "scheduled_ms": NOON_MS + 50, "first_token_ms": NOON_MS + 100, "last_token_ms": NOON_MS + 980,
        "finished_ms": NOON_MS + 1000, "ttft_s": 0.1, "e2e_s": 1.0, "attempts": 1,
        "options": {"max_tokens": 64, "temperature": 0.5},
    }  # fmt: skip
    return dict.fromkeys(jobs.c.keys()) | usual | columns


def attempt(epoch: int, started_ms: int, ended_ms: int | None, **columns: object) -> Row:
    """A claim by a worker; times are after noon."""
    usual: dict[str, object] = {
        "epoch": epoch, "attempt": epoch, "incarnation": f"inc-{epoch}", "outcome": "done",
        "started_ms": NOON_MS + started_ms, "ended_ms": None if ended_ms is None else NOON_MS + ended_ms,
    }  # fmt: skip
    return dict.fromkeys(attempts.c.keys()) | usual | columns


def by_name(spans: list[JobSpan]) -> list[tuple[str, int, int]]:
    """Name, start and end of each, in ms after noon."""
    return [(span.name, span.start_ms - NOON_MS, span.end_ms - NOON_MS) for span in spans]


class TestGivenAJobOfOneAttempt:
    def test_when_it_is_done_then_each_phase_is_a_span(self) -> None:
        spans = spans_of(job(), [attempt(1, 40, 1000)])

        assert by_name(spans) == [
            ("llm_request", 0, 1000),
            ("sluice_queue", 0, 40),
            ("sluice_attempt", 40, 1000),
            ("sluice_pull", 40, 50),
            ("sluice_prefill", 50, 100),
            ("sluice_decode", 100, 980),
            ("sluice_publish", 980, 1000),
        ]
        assert not any(span.error for span in spans)
        root, _, whole, *phases = spans
        assert {span.parent_id for span in spans[1:3]} == {root.span_id}
        assert {span.parent_id for span in phases} == {whole.span_id}

    def test_when_it_is_done_then_the_root_has_the_attributes_of_genai(self) -> None:
        attributes = spans_of(job(), [attempt(1, 40, 1000)])[0].attributes

        assert attributes["gen_ai.request.model"] == "tiny"
        assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (11, 20)
        assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
        assert attributes["gen_ai.request.temperature"] == 0.5
        assert "gen_ai.request.top_p" not in attributes

    @pytest.mark.parametrize("state", ["failed", "cancelled", "expired"])
    def test_when_it_is_not_done_then_root_and_attempt_are_errors(self, state: str) -> None:
        ended = job(state=state, reason=None, error_code="out_of_memory", error="too large")

        root, _, whole, *_ = spans_of(ended, [attempt(1, 40, 1000, outcome=state, why="out_of_memory")])

        assert (root.error, whole.error) == ("too large", "out_of_memory")
        assert root.attributes["error.type"] == "out_of_memory"

    def test_when_it_never_ran_then_all_of_it_is_the_queue(self) -> None:
        spans = spans_of(job(state="expired", scheduled_ms=None, first_token_ms=None, last_token_ms=None), [])

        assert by_name(spans) == [("llm_request", 0, 1000), ("sluice_queue", 0, 1000)]


class TestGivenAJobWhoseWorkerWasKilled:
    def test_when_another_resumed_it_then_both_workers_are_in_one_trace(self) -> None:
        rows = [attempt(2, 700, 1000), attempt(1, 40, 600, outcome="returned", why="owner_died")]

        spans = spans_of(job(attempts=2), rows)

        assert by_name(spans) == [
            ("llm_request", 0, 1000),
            ("sluice_queue", 0, 40),
            ("sluice_attempt", 40, 600),
            ("sluice_pull", 40, 50),
            ("sluice_prefill", 50, 100),
            ("sluice_decode", 100, 600),
            ("sluice_queue", 600, 700),
            ("sluice_attempt", 700, 1000),
            ("sluice_decode", 700, 980),
            ("sluice_publish", 980, 1000),
        ]
        killed, resumed = [span for span in spans if span.name == "sluice_attempt"]
        assert (killed.error, resumed.error) == ("owner_died", None)
        assert [span.attributes["sluice.worker"] for span in (killed, resumed)] == ["inc-1", "inc-2"]
        assert len({span.trace_id for span in spans}) == 1

    def test_when_its_last_heartbeat_is_known_then_decode_ends_there(self) -> None:
        rows = [attempt(1, 40, 600, outcome="returned", why="death", seen_ms=NOON_MS + 250), attempt(2, 700, 1000)]

        spans = spans_of(job(attempts=2), rows)

        assert by_name(spans)[5:8] == [
            ("sluice_decode", 100, 250), ("sluice_lost", 250, 600), ("sluice_queue", 600, 700),
        ]  # fmt: skip


class TestGivenAPreemptedJob:
    def test_when_spans_are_made_then_decode_has_an_event_for_each(self) -> None:
        spans = spans_of(job(), [attempt(1, 40, 1000, preemption_times=[[160, 30], [400, None]])])

        [decode] = [span for span in spans if span.name == "sluice_decode"]
        assert [(one.name, one.at_ms - NOON_MS) for one in decode.events] == [("preempted", 200), ("preempted", 440)]
        assert [one.attributes.get("sluice.wait_ms") for one in decode.events] == [30, None]
        assert not any(span.events for span in spans if span is not decode)


class TestGivenAProducerThatTraces:
    def test_when_it_samples_then_the_job_is_a_part_of_its_trace(self) -> None:
        spans = spans_of(job(traceparent=TRACEPARENT), [attempt(1, 40, 1000)])

        assert {f"{span.trace_id:032x}" for span in spans} == {"4bf92f3577b34da6a3ce929d0e0e4736"}
        assert f"{spans[0].parent_id:016x}" == "00f067aa0ba902b7"
        assert spans[0].is_remote_child

    def test_when_it_does_not_sample_then_there_is_no_span(self) -> None:
        assert spans_of(job(traceparent=TRACEPARENT[:-1] + "0"), [attempt(1, 40, 1000)]) == []

    @pytest.mark.parametrize("text", ["", "00-zz-1-01", f"00-{'0' * 32}-00f067aa0ba902b7-01", TRACEPARENT + "x"])
    def test_when_its_header_is_wrong_then_the_job_has_a_trace_of_its_own(self, text: str) -> None:
        [root, *_] = spans_of(job(traceparent=text), [attempt(1, 40, 1000)])

        assert root.parent_id is None
        assert root.trace_id == spans_of(job(), [])[0].trace_id


Ms = st.none() | st.integers(NOON_MS - 10, NOON_MS + 2000)


class TestGivenAnyRows:
    @given(
        times=st.fixed_dictionaries(dict.fromkeys(("scheduled_ms", "first_token_ms", "last_token_ms"), Ms)),
        claims=st.lists(st.tuples(Ms, Ms, Ms), max_size=4),
    )
    def test_when_spans_are_made_then_they_are_nested_stable_and_in_order(
        self, times: dict[str, int | None], claims: list[tuple[int | None, int | None, int | None]]
    ) -> None:
        rows = [
            {**attempt(epoch, 0, 0), "started_ms": start, "ended_ms": end, "seen_ms": seen}
            for epoch, (start, end, seen) in enumerate(claims, start=1)
        ]

        spans = spans_of(job(**times), rows)

        assert spans == spans_of(job(**times), rows[::-1])
        assert len({span.span_id for span in spans}) == len(spans)
        parents = {span.span_id: span for span in spans}
        for span in spans:
            assert span.end_ms >= span.start_ms
            if span.name in ("sluice_pull", "sluice_prefill", "sluice_decode", "sluice_publish", "sluice_lost"):
                assert span.parent_id is not None
                parent = parents[span.parent_id]
                assert parent.start_ms <= span.start_ms <= span.end_ms <= parent.end_ms
        phases = [span for span in spans if span.parent_id not in (None, spans[0].span_id)]
        for one, next_one in pairwise(phases):
            assert one.parent_id != next_one.parent_id or one.end_ms == next_one.start_ms
