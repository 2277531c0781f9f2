"""Rebuild lost jobs as they were submitted, from a history that keeps prompts. Knows no Redis."""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.history.tables import AnyRow, jobs
from sluice.protocol import limits
from sluice.protocol.calls import NewJob, SourceLine
from sluice.protocol.clock import wall_ms
from sluice.protocol.tools import ToolCall
from sluice.protocol.wire import JobId, Message, Prompt, decode_spec, encode_prompt
from sluice.worker.audit.history_side import OPEN_STATES
from sluice.worker.audit.queue_side import in_slices

LostJobs = Callable[[Sequence[JobId]], Iterator[tuple[JobId, NewJob | str]]]
"""A source of lost jobs: yields each that it knows as it was submitted, or the reason why it cannot be rebuilt."""


def jobs_of_history(engine: Engine, queue: str, job_ids: Sequence[JobId]) -> Iterator[tuple[JobId, NewJob | str]]:
    """Yield jobs of a history. Its times are absolute, so a job keeps its remaining delay and time to live."""
    for ids in in_slices(job_ids, limits.SLICE_JOBS):
        query = sa.select(jobs).where(jobs.c.id.in_(ids), jobs.c.queue == queue)
        with engine.connect() as connection:
            # The newest submission of each job, and before it one that has not ended.
            order = (jobs.c.state.in_(OPEN_STATES), jobs.c.submitted_ms)
            rows = {JobId(row.id): row for row in connection.execute(query.order_by(*order))}
        yield from ((job_id, _job_of(row, wall_ms())) for job_id, row in rows.items())


def _job_of(row: AnyRow, now_ms: int) -> NewJob | str:
    if row.prompt is None or row.asked is None:
        return "the history does not keep its prompt (keep_prompts is not full, or it was erased)"
    if sha256(row.prompt.encode()).hexdigest() != row.prompt_sha256:
        return "the history's prompt differs from the submitted one: the database refused it, and it was cleaned"
    fields: Mapping[str, str] = row.asked
    prompt = _prompt(row.prompt, fields["prompt"])
    encoded = base64.b64decode(fields["spec"])
    spec = decode_spec(encoded)
    return NewJob(
        id=JobId(row.id),
        spec=encoded,
        payload=encode_prompt(prompt),
        seed=int(row.seed),
        priority=row.priority,
        prompt_tokens=len(prompt) if fields["prompt"] == "ids" else None,
        prompt_bytes=_num_bytes(prompt),
        max_tokens=spec.options.planned_tokens,
        is_length_stated=spec.options.max_tokens is not None,
        choices=row.choices,
        idempotency_key=fields.get("key"),
        digest=bytes.fromhex(fields["digest"]),
        batch=row.batch,
        not_before_ms=row.not_before_ms,
        ttl_ms=None if row.ttl_ms is None else max(1, row.ttl_ms - now_ms),
        deadline_ms=row.deadline_ms,
        wants_callback=spec.callback_url is not None,
        source=_source(row),
        submitted_ms=row.submitted_ms,
    )


def _source(row: AnyRow) -> SourceLine | None:
    if row.line is None:
        return None
    return SourceLine(custom_id=row.custom_id, number=row.line, endpoint=row.endpoint)


def _prompt(text: str, kind: str) -> Prompt:
    """Restore a prompt from the text that `sluice.history.rows` wrote."""
    if kind == "text":
        return text
    parts: list[Any] = json.loads(text)
    return tuple(map(_message, parts)) if kind == "chat" else tuple(parts)


def _message(part: dict[str, Any]) -> Message:  # Any: Message checks each part
    calls = tuple(ToolCall(**call) for call in part.pop("tool_calls", ()))
    return Message(**part, tool_calls=calls)


def _num_bytes(prompt: Prompt) -> int:
    """Count the bytes of a prompt's text as a producer does; 0 for token ids."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    return sum(part.num_bytes for part in cast("Iterable[Message | int]", prompt) if isinstance(part, Message))
