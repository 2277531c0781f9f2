"""The spans of one ended job, from its rows in the history. Pure: knows no SQL and no exporter.

The recorder makes them, not the workers: a worker that is killed could not export its part, and the token path stays as
it is. Names follow vLLM's request spans (vllm-project/vllm#44402), attributes OpenTelemetry's GenAI conventions.

    llm_request                          submit to end
        sluice_queue                     before each attempt
        sluice_attempt                   a worker has the job
            sluice_pull                  until it is scheduled
            sluice_prefill               until the first token is published
            sluice_decode                until the last token is computed
            sluice_publish               until the end is published
            sluice_lost                  from the last heartbeat of a worker that died until another takes over

Preemptions are events of the phase in which they happened, `sluice_decode` in general.

Ids are functions of the job, so a span that is exported twice is the same span.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, cast

from sluice.history.phases import Phases, phases_of
from sluice.protocol.messages import TRACE_CONTEXT

Row = Mapping[str, object]
"""Of `jobs` or `attempts`, by column."""

Attributes = dict[str, str | bool | int | float | tuple[str, ...]]

Interval = tuple[int, int]
"""Start and end, in milliseconds."""

MAX_MS = (2**63 - 1) // 1_000_000
"""The last time that a span can have: it counts nanoseconds. A forged event may have a later one."""

PHASES = ("sluice_pull", "sluice_prefill", "sluice_decode", "sluice_publish", "sluice_lost")
SAMPLED = 1


class SpanEvent(NamedTuple):
    """A moment in a span."""

    name: str
    at_ms: int
    attributes: Attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpan:
    """One span. Times are milliseconds since 1970 by the clock of the queue's server."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ms: int
    end_ms: int
    attributes: Attributes = field(default_factory=Attributes)
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None
    is_remote_child: bool = False
    """Whether its parent is a span of the producer."""


def spans_of(job: Row, attempts: Sequence[Row]) -> list[JobSpan]:
    """Make the spans of an ended job, the root first; none if its producer does not sample this trace.

    Args:
        job: Its row in `jobs`.
        attempts: Its rows in `attempts`, in any order.
    """
    context = TRACE_CONTEXT.fullmatch(str(job["traceparent"] or ""))
    if context and not int(context[3], 16) & SAMPLED:
        return []
    made = _Maker(job, sorted(attempts, key=lambda row: _ms(row["epoch"]) or 0), context)
    return list(made.spans())


class _Maker:
    """A maker of the spans of one job, with their common values."""

    def __init__(self, job: Row, attempts: Sequence[Row], context: re.Match[str] | None) -> None:
        self._job, self._attempts = job, attempts
        self._identity = f"{job['id']} {job['submitted_ms']}"
        self._trace_id = int(context[1], 16) if context else self._id("trace", num_bytes=16)
        self._producer_id = int(context[2], 16) if context else None
        self._root_id = self._id("llm_request")
        self._began_ms = _ms(job["submitted_ms"]) or 0
        self._ended_ms = max(_ms(job["finished_ms"]) or 0, self._began_ms)

    def spans(self) -> Iterator[JobSpan]:
        """Yield the root, then what happened, in order."""
        yield self._root()
        free_ms = self._began_ms
        for row in self._attempts:
            started_ms = _ms(row["started_ms"])
            if started_ms is None:
                continue  # an end of a claim that the history does not know
            ended_ms = _ms(row["ended_ms"]) or self._ended_ms
            yield self._span("sluice_queue", row["epoch"], (free_ms, started_ms))
            yield from self._attempt(row, (started_ms, ended_ms))
            free_ms = ended_ms
        if not self._attempts:
            yield self._span("sluice_queue", 0, (free_ms, self._ended_ms))

    def _root(self) -> JobSpan:
        job = self._job
        return JobSpan(
            name="llm_request",
            trace_id=self._trace_id,
            span_id=self._root_id,
            parent_id=self._producer_id,
            is_remote_child=self._producer_id is not None,
            start_ms=self._began_ms,
            end_ms=self._ended_ms,
            attributes=_request_attributes(job),
            error=None if job["state"] == "done" else str(job["error"] or job["reason"] or job["state"]),
        )

    def _attempt(self, row: Row, times: Interval) -> Iterator[JobSpan]:
        error = None if row["outcome"] == "done" else str(row["why"] or row["outcome"] or "no end is known")
        whole = self._span("sluice_attempt", row["epoch"], times)
        yield replace(whole, attributes=_attempt_attributes(row), error=error)
        phases = self._phases(row, times)
        preemptions = list(_preemptions(row, times[0], phases.alive_ms))
        for name, (start_ms, end_ms) in zip(PHASES, pairwise((times[0], *phases, times[1])), strict=True):
            if end_ms > start_ms:
                phase = self._span(name, row["epoch"], (start_ms, end_ms))
                events = tuple(event for event in preemptions if start_ms <= event.at_ms < end_ms)
                yield replace(phase, parent_id=whole.span_id, events=events)

    def _phases(self, row: Row, times: Interval) -> Phases:
        job = self._job
        return phases_of(
            *times,
            scheduled_ms=_ms(job["scheduled_ms"]),
            first_token_ms=_ms(job["first_token_ms"]),
            last_token_ms=_ms(job["last_token_ms"]) if row is self._attempts[-1] else None,
            seen_ms=_ms(row["seen_ms"]),
        )

    def _span(self, name: str, epoch: object, times: Interval) -> JobSpan:
        start_ms, end_ms = times
        return JobSpan(
            name=name,
            trace_id=self._trace_id,
            span_id=self._id(f"{name} {epoch}"),
            parent_id=self._root_id,
            start_ms=start_ms,
            end_ms=max(start_ms, end_ms),
        )

    def _id(self, what: str, num_bytes: int = 8) -> int:
        digest = hashlib.sha256(f"{self._identity} {what}".encode()).digest()
        return int.from_bytes(digest[:num_bytes]) or 1  # 0 is not an id


def _request_attributes(job: Row) -> Attributes:
    options = cast("Row", job["options"] or {})
    reason = job["reason"]
    return _known(
        {
            "gen_ai.provider.name": "sluice",
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.id": job["id"],
            "gen_ai.request.model": job["model"],
            "gen_ai.request.max_tokens": options.get("max_tokens"),
            "gen_ai.request.temperature": options.get("temperature"),
            "gen_ai.request.top_p": options.get("top_p"),
            "gen_ai.request.choice.count": job["choices"],
            "gen_ai.response.finish_reasons": (reason,) if job["state"] == "done" and reason else None,
            "gen_ai.usage.input_tokens": job["prompt_tokens"],
            "gen_ai.usage.cache_read.input_tokens": job["cached_tokens"],
            "gen_ai.usage.output_tokens": job["output_tokens"],
            "gen_ai.latency.time_in_queue": job["queue_s"],
            "gen_ai.latency.time_to_first_token": job["ttft_s"],
            "gen_ai.latency.e2e": job["e2e_s"],
            "error.type": None if job["state"] == "done" else job["error_code"] or job["state"],
            "sluice.queue": job["queue"],
            "sluice.tenant": job["tenant"],
            "sluice.batch": job["batch"],
            "sluice.state": job["state"],
            "sluice.attempts": job["attempts"],
            "sluice.preemptions": job["preemptions"],
            "sluice.resumed_tokens": job["resumed_tokens"],
            "sluice.exactness": job["exactness"],
        }
    )


def _attempt_attributes(row: Row) -> Attributes:
    return _known(
        {
            "sluice.worker": row["incarnation"],
            "sluice.attempt": row["attempt"],
            "sluice.outcome": row["outcome"],
            "sluice.reader_gap_s": row["gap_s"],
        }
    )


def _preemptions(row: Row, started_ms: int, ended_ms: int) -> Iterator[SpanEvent]:
    for at_ms, wait_ms in cast("Sequence[tuple[int, int | None]]", row["preemption_times"] or ()):
        attributes = {"sluice.wait_ms": wait_ms, "sluice.worker": row["incarnation"]}
        yield SpanEvent("preempted", max(started_ms, min(started_ms + at_ms, ended_ms)), _known(attributes))


def _known(values: Mapping[str, object]) -> Attributes:
    return {name: value for name, value in values.items() if isinstance(value, (str, bool, int, float, tuple))}


def _ms(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= MAX_MS else None
