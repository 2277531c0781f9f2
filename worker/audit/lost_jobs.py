"""Jobs to submit again, as they were: from the rows of a history that keeps prompts. Knows no Redis."""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol, cast

import sqlalchemy as sa
from sqlalchemy.engine import Engine, Row

from producer.contract import limits
from producer.contract.calls import NewJob
from producer.contract.tables import jobs
from producer.contract.wire import JobId, Message, Prompt, decode_spec, encode_prompt
from worker.audit.queue_side import in_bites
from worker.clock import wall_ms

JobRow = Row[*tuple[Any, ...]]  # Any: columns of several types


class LostJobs(Protocol):
    """Where jobs can be had again."""

    def jobs(self, job_ids: Sequence[JobId]) -> Iterator[tuple[JobId, NewJob | str]]:
        """Each job as it was submitted, or a sentence why it cannot be had; one that is not known here is left out."""
        ...


@dataclass(frozen=True, slots=True)
class HistoryJobs:
    """The jobs of a history. Its times are points in time, so that what a job had left to wait goes on."""

    engine: Engine
    queue: str

    def jobs(self, job_ids: Sequence[JobId]) -> Iterator[tuple[JobId, NewJob | str]]:
        """See `LostJobs`."""
        for ids in in_bites(job_ids, limits.MAX_BITE):
            query = sa.select(jobs).where(jobs.c.id.in_(ids), jobs.c.queue == self.queue)
            with self.engine.connect() as connection:
                rows = connection.execute(query).all()
            yield from ((JobId(row.id), _job_of(row, wall_ms())) for row in rows)


def _job_of(row: JobRow, now_ms: int) -> NewJob | str:
    if row.prompt is None or row.asked is None:
        return "the history does not keep its prompt (keep_prompts is not full, or it was erased)"
    if sha256(row.prompt.encode()).hexdigest() != row.prompt_sha256:
        return "the history's prompt is not the one that was submitted: the database did not take it as it was"
    asked: Mapping[str, str] = row.asked
    prompt = _prompt(row.prompt, asked["prompt"])
    spec = base64.b64decode(asked["spec"])
    return NewJob(
        id=JobId(row.id),
        spec=spec,
        payload=encode_prompt(prompt),
        seed=int(row.seed),
        priority=row.priority,
        prompt_tokens=len(prompt) if asked["prompt"] == "ids" else None,
        prompt_bytes=_num_bytes(prompt),
        max_tokens=row.options["max_tokens"],
        choices=row.choices,
        idempotency_key=asked.get("key"),
        digest=bytes.fromhex(asked["digest"]),
        batch=row.batch,
        not_before_ms=row.not_before_ms,
        ttl_ms=None if row.ttl_ms is None else max(1, row.ttl_ms - now_ms),
        deadline_ms=row.deadline_ms,
        wants_callback=decode_spec(spec).callback_url is not None,
    )


def _prompt(text: str, kind: str) -> Prompt:
    """As it was before `worker.history.rows` wrote it as text."""
    if kind == "text":
        return text
    parts: list[Any] = json.loads(text)
    return tuple(Message(**part) for part in parts) if kind == "chat" else tuple(parts)


def _num_bytes(prompt: Prompt) -> int:
    """Of its text, as a producer counts it; token ids are counted exactly."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    return sum(
        len(part.content.encode()) for part in cast("Iterable[Message | int]", prompt) if isinstance(part, Message)
    )
