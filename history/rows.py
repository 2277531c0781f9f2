"""Convert events of the outbox to rows of the history. Plain values: knows no Redis and no SQL.

A job id may be used again once the queue has forgotten it, so a row belongs to a submission: a job id and its submit
time. Events may arrive in any order, repeatedly, and through several recorders. So every other column belongs to a
`Group` with a commutative and idempotent merge. `merge` merges two rows in memory; `upserts` does the same in SQL.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from sluice.history.results import result_columns
from sluice.history.tables import Group, attempts, columns_of, jobs
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.messages import Measure
from sluice.protocol.states import JobState
from sluice.protocol.wire import (
    JobId,
    JobOptions,
    JobRecord,
    JobSpec,
    OutboxEvent,
    Prompt,
    ResolvedOptions,
    WireError,
    decode_prompt,
    decode_record,
    decode_spec,
)

_MAX_DIGITS = 19
"""A number of fewer digits fits 64 bits."""

KeepPrompts = Literal["none", "hash", "full"]
Row = dict[str, object]
Submission = tuple[JobId, int]
"""A job id and its submit time: the key of a row."""

EventFields = Mapping[str, bytes | int | None]

NEWEST, SUBMITTED = columns_of(jobs, Group.NEWEST), columns_of(jobs, Group.SUBMITTED)
LEAST, GREATEST = columns_of(jobs, Group.LEAST), columns_of(jobs, Group.GREATEST)
IDENTITY: tuple[str, ...] = ("id", "queue", "partition", "tenant", "submitted_ms")

ATTEMPT_KEY: tuple[str, ...] = ("job_id", "submitted_ms", "epoch")
STARTED_ATTEMPT, ENDED_ATTEMPT = columns_of(attempts, Group.STARTED), columns_of(attempts, Group.ENDED)


@dataclass(slots=True, eq=False)
class JobChange:
    """The merged events of one submission. Changes as events are merged into it."""

    job: Row
    attempts: dict[int, Row] = field(default_factory=dict[int, Row])
    result: Row | None = None
    """Result row of the newest end with a result."""

    is_returned: bool = False
    """Whether the job returned to the queue, which reopens its batch."""

    @property
    def submission(self) -> Submission:
        """The job's id and its submit time."""
        return JobId(str(self.job["id"])), _number(self.job["submitted_ms"])


def changes_of(
    queue: str, events: Iterable[OutboxEvent], *, keep_prompts: KeepPrompts = "full"
) -> dict[Submission, JobChange]:
    """Fold events into one change per submission.

    Args:
        queue: Name of the queue of the outbox.
        events: Events of any jobs, in any order.
        keep_prompts: Upper limit on what is kept of prompts, even if events contain more.
    """
    changes: dict[Submission, JobChange] = {}
    for event in events:
        submitted_ms = submit_time(event)
        change = changes.get((event.job_id, submitted_ms))
        if change is None:
            change = changes[event.job_id, submitted_ms] = JobChange(_blank_job(queue, event, submitted_ms))
        _READERS[event.kind](change, event, keep_prompts)
    return changes


def submit_time(event: OutboxEvent) -> int:
    """Return when the job of an event was submitted.

    Raises:
        WireError: no script writes such an event.
    """
    submitted_ms = _whole(event.fields.get("submitted_ms"))
    if submitted_ms is None or submitted_ms < 0:
        raise WireError(f"an event of job {event.job_id} does not say when the job was submitted")
    return submitted_ms


def merge(old: Row, new: Row) -> Row:
    """Merge two rows of the same submission, in either order."""
    if _version(old) == _NOTHING_YET:
        return new
    newest = new if _version(new) > _version(old) else old
    return {
        **{name: old[name] for name in IDENTITY},
        **{name: newest[name] for name in NEWEST},
        **{name: new[name] if old[name] is None else old[name] for name in SUBMITTED},
        **{name: _pick(min, old[name], new[name]) for name in LEAST},
        **{name: _pick(max, old[name], new[name]) for name in GREATEST},
    }


def merge_attempt(old: Row, new: Row) -> Row:
    """Merge two rows of the same attempt, in either order."""
    ends = [row for row in (old, new) if row["end_version"] is not None]
    first_end = min(ends, key=lambda row: _number(row["end_version"]), default=old)
    return {
        **{name: old[name] for name in ATTEMPT_KEY},
        **{name: new[name] if old[name] is None else old[name] for name in STARTED_ATTEMPT},
        **{name: first_end[name] for name in ENDED_ATTEMPT},
    }


# ---------------------------------------------------------------- one function for each kind of event


def _submitted(change: JobChange, event: OutboxEvent, keep_prompts: KeepPrompts) -> None:
    fields = event.fields
    row = _blank_job_like(change.job, event, JobState.QUEUED)
    row |= {
        "priority": _whole(fields.get("priority")),
        "estimated_prompt_tokens": _whole(fields.get("prompt_tokens")),
        "reserved_tokens": _whole(fields.get("cost")),
        "seed": _text(fields.get("seed")),
        "batch": _text(fields.get("batch")),
        "not_before_ms": _whole(fields.get("not_before_ms")),
        "deadline_ms": _whole(fields.get("deadline_ms")),
        "ttl_ms": _whole(fields.get("ttl_ms")),
        "custom_id": _text(fields.get("custom_id")),
        "line": _whole(fields.get("line")),
        "endpoint": _text(fields.get("endpoint")),
    }
    _read_into(row, fields.get("spec"), lambda data: _spec_columns(decode_spec(data)))
    if keep_prompts != "none":
        # The name of the field states how much of the prompt the queue allows to keep.
        _read_into(row, fields.get("prompt"), lambda data: _prompt_columns(data, keep_prompts, fields))
        _read_into(row, fields.get("prompt_to_hash"), lambda data: _prompt_columns(data, "hash", fields))
    change.job = merge(change.job, row)


def _started(change: JobChange, event: OutboxEvent, _: KeepPrompts) -> None:
    fields = event.fields
    row = _blank_job_like(change.job, event, JobState.RUNNING)
    incarnation, attempt = _text(fields.get("incarnation")), _whole(fields.get("attempt"))
    row |= {"worker": incarnation, "pulled_ms": event.at_ms, "attempts": attempt}
    change.job = merge(change.job, row)
    started: Row = {"attempt": attempt, "incarnation": incarnation, "started_ms": event.at_ms}
    _merge_attempt_into(change, event, started)


def _returned(change: JobChange, event: OutboxEvent, _: KeepPrompts) -> None:
    why, code = _text(event.fields.get("why")), _text(event.fields.get("error_code"))
    row = _blank_job_like(change.job, event, JobState.QUEUED)
    # A job that waits for a retry shows the error of its last attempt.
    row |= {"reason": why, "error": _text(event.fields.get("error")), "error_code": code}
    change.job = merge(change.job, row)
    change.is_returned = True
    end: Row = {"end_version": event.version, "ended_ms": event.at_ms, "outcome": "returned", "why": code or why}
    end["gap_s"] = _seconds(_whole(event.fields.get("gap_ms")))
    end["seen_ms"] = _whole(event.fields.get("seen_ms"))
    _merge_attempt_into(change, event, end)


def _ended(change: JobChange, event: OutboxEvent, _: KeepPrompts) -> None:
    fields = event.fields
    state = _text(fields.get("state")) or JobState.FAILED
    row = _blank_job_like(change.job, event, state)
    incarnation = _text(fields.get("incarnation"))
    row |= {
        "reason": _text(fields.get("reason")),
        "error": _text(fields.get("error")),
        "error_code": _text(fields.get("error_code")),
        "worker": incarnation,
        "finished_ms": event.at_ms,
        "scheduled_ms": _whole(fields.get("first_scheduled_ms")),
        "first_token_ms": _whole(fields.get("first_token_ms")),
        "attempts": _whole(fields.get("attempt")),
    }
    columns: Row = {"gap_s": _seconds(_whole(fields.get("gap_ms")))}
    _read_into(columns, fields.get("record"), lambda data: _record_columns(decode_record(data)))
    attempt: Row = {"attempt": row["attempts"], "incarnation": incarnation}
    attempt |= {name: columns.pop(name) for name in _MEASURED_OF_ATTEMPT if name in columns}
    row |= columns
    _read_result(change, row, event)
    change.job = merge(change.job, row)
    why = row["error_code"] or row["reason"]
    attempt |= {"end_version": event.version, "ended_ms": event.at_ms, "outcome": state, "why": why}
    _merge_attempt_into(change, event, attempt)


_READERS: Mapping[str, Callable[[JobChange, OutboxEvent, KeepPrompts], None]] = {
    "submitted": _submitted,
    "started": _started,
    "returned": _returned,
    "ended": _ended,
}


# ---------------------------------------------------------------- encoded parts -> columns


def _spec_columns(spec: JobSpec) -> Row:
    options: Row = {name: getattr(spec.options, name) for name in _OPTIONS}
    options["logit_bias"] = {str(token): bias for token, bias in spec.options.logit_bias.items()}
    columns: Row = {
        "choices": spec.options.n,
        "traceparent": spec.traceparent,
        "options": options,
        "metadata": dict(spec.metadata),
    }
    return columns if spec.batch is None else columns | {"batch": spec.batch}


def _prompt_columns(data: bytes, keep_prompts: KeepPrompts, fields: EventFields) -> Row:
    prompt = decode_prompt(data)
    text = _prompt_text(prompt)
    columns: Row = {"prompt_sha256": hashlib.sha256(text.encode()).hexdigest()}
    return columns if keep_prompts != "full" else columns | {"prompt": text, "asked": _asked(prompt, fields)}


def _asked(prompt: Prompt, fields: EventFields) -> Row | None:
    """Return what is needed, besides other columns, to submit a lost job again."""
    spec, digest = fields.get("spec"), fields.get("digest")
    if not isinstance(spec, bytes) or not isinstance(digest, bytes):
        return None
    kind = "text" if isinstance(prompt, str) else "ids" if isinstance(prompt[0], int) else "chat"
    asked: Row = {"prompt": kind, "spec": base64.b64encode(spec).decode(), "digest": digest.hex()}
    key = _text(fields.get("key"))
    return asked if key is None else asked | {"key": key}


def _prompt_text(prompt: Prompt) -> str:
    """Return text unchanged, and messages and token ids as JSON."""
    if isinstance(prompt, str):
        return prompt
    parts = [part if isinstance(part, int) else _message(asdict(part)) for part in prompt]
    return json.dumps(parts, ensure_ascii=False)


def _message(fields: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None and value != ()}


def _record_columns(record: JobRecord) -> Row:
    """Return the columns of a record, those of the attempt too. A value that was not taken leaves the event's."""
    columns = {measure.column: _column(name, measure, getattr(record, name)) for name, measure in _MEASURES.items()}
    if not record.preemption_times:
        columns["preempted_s"] = None
    return {name: value for name, value in columns.items() if value is not None}


def _column(name: str, measure: Measure, value: object) -> object:
    if isinstance(value, ResolvedOptions):
        return asdict(value)
    if isinstance(value, int | float) and name.endswith("_ms") and measure.column.endswith("_s"):
        return value / 1000
    return None if value == () else value


def _read_result(change: JobChange, row: Row, event: OutboxEvent) -> None:
    data = event.fields.get("result")
    if data is None or (change.result and _version(change.result) >= event.version):
        return
    columns: Row = {}
    _read_into(columns, data, result_columns)
    if "record_error" in columns:
        row["record_error"] = columns.pop("record_error")
    if not columns:
        return
    change.result = {
        "job_id": event.job_id,
        "submitted_ms": change.job["submitted_ms"],
        "version": event.version,
        "finished_ms": event.at_ms,
        **columns,
    }


def _read_into(row: Row, data: bytes | int | None, read: Callable[[bytes], Row]) -> None:
    """Add the columns of an encoded part, or set `record_error` if it cannot be decoded."""
    if data is None:
        return
    try:
        row |= read(data if isinstance(data, bytes) else str(data).encode())
    except (WireError, ValueError, TypeError) as error:
        row["record_error"] = f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------- small things

_NOTHING_YET = -1
_OPTIONS = tuple(option.name for option in fields(JobOptions))
_MEASURES: Mapping[str, Measure] = {measured.name: measured.metadata[Measure] for measured in fields(JobRecord)}
_MEASURED_OF_ATTEMPT = tuple(measure.column for measure in _MEASURES.values() if measure.table == "attempts")
_BLANK: Row = {**dict.fromkeys((*NEWEST, *SUBMITTED, *LEAST, *GREATEST))}
_BLANK_ATTEMPT: Row = {**dict.fromkeys((*STARTED_ATTEMPT, *ENDED_ATTEMPT))}


def _blank_job(queue: str, event: OutboxEvent, submitted_ms: int) -> Row:
    partition, tenant, _ = split_job_id(event.job_id)
    identity: Row = {"id": event.job_id, "queue": queue, "partition": partition, "tenant": tenant}
    return _BLANK | identity | {"submitted_ms": submitted_ms} | {"version": _NOTHING_YET, "state": JobState.QUEUED}


def _blank_job_like(job: Row, event: OutboxEvent, state: str) -> Row:
    return _BLANK | {name: job[name] for name in IDENTITY} | {"version": event.version, "state": str(state)}


def _merge_attempt_into(change: JobChange, event: OutboxEvent, columns: Row) -> None:
    epoch = event.fields.get("epoch")
    # A job that ended before a worker started it has no attempt.
    if not isinstance(epoch, int) or epoch <= 0:
        return
    key: Row = {"job_id": event.job_id, "submitted_ms": change.job["submitted_ms"], "epoch": epoch}
    row = _BLANK_ATTEMPT | key | columns
    before = change.attempts.get(epoch)
    change.attempts[epoch] = row if before is None else merge_attempt(before, row)


def _pick(choose: Callable[[Any, Any], Any], old: object, new: object) -> object:  # Any: numbers or texts
    if old is None or new is None:
        return new if old is None else old
    return choose(old, new)


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


def _version(row: Row) -> int:
    return _number(row["version"])


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _whole(value: bytes | int | None) -> int | None:
    """Convert a field to an int of 64 bits. Scripts write some as text. Return None for any other value."""
    if isinstance(value, bytes):
        return int(value) if value.isdigit() and len(value) < _MAX_DIGITS else None
    # Anyone who may write to the outbox chooses the type; a column must have one type, or rows could not be merged.
    return value if type(value) is int and abs(value) < 2**63 else None


def _text(value: bytes | int | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else None if value is None else str(value)
