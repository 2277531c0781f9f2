"""Write a batch from the history as JSON lines in OpenAI's batch format. Knows no Redis.

There are two files, for done jobs and for others. Each is written to a temporary name and renamed when complete. A job
from a bulk file has the `custom_id`, number and endpoint of its line. For other jobs, `custom_id` and `endpoint` are
from the metadata; without them the `custom_id` is the job's id. The body is a chat completion if the endpoint is
/v1/chat/completions, otherwise a completion.
"""

import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.history.results import result_of
from sluice.history.tables import AnyRow, jobs, results
from sluice.protocol.openai_format.bodies import chat_body, completion_body

CHAT_ENDPOINT = "/v1/chat/completions"
ROWS_AT_ONCE = 20
"""Rows in memory. Each may have a large result."""

Object = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The files and counts of an export."""

    output_path: Path
    error_path: Path
    num_done: int
    num_failed: int
    num_open: int
    """Jobs that have not ended; they are in neither file."""


@dataclass(frozen=True, slots=True)
class BatchJobs:
    """The jobs of a batch, without those of earlier batches of the same name."""

    queue: str
    batch: str
    began_ms: int | None = None
    """When its first job was submitted; None takes all."""

    def clauses(self) -> list[sa.ColumnElement[bool]]:
        """Return conditions on the table `jobs`."""
        since_ms = 0 if self.began_ms is None else self.began_ms
        return [jobs.c.queue == self.queue, jobs.c.batch == self.batch, jobs.c.submitted_ms >= since_ms]


def export_batch(engine: Engine, batch_jobs: BatchJobs, folder: Path) -> Exported:
    """Write `<batch>.output.jsonl` and `<batch>.errors.jsonl` into `folder`, in the order of submission.

    Of a job that was submitted to the batch more than once, the newest submission is written.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Quoted, so that a batch's name cannot leave the folder and no two names collide.
    name = quote(batch_jobs.batch, safe="")
    output_path, error_path = folder / f"{name}.output.jsonl", folder / f"{name}.errors.jsonl"
    counts = {"done": 0, "failed": 0, "open": 0}
    with _whole(output_path) as output, _whole(error_path) as errors, engine.connect() as connection:
        rows = connection.execution_options(yield_per=ROWS_AT_ONCE).execute(_jobs_of(batch_jobs))
        for row in rows:
            counts[_write(row, output, errors)] += 1
    return Exported(
        output_path=output_path,
        error_path=error_path,
        num_done=counts["done"],
        num_failed=counts["failed"],
        num_open=counts["open"],
    )


def num_ended(engine: Engine, batch_jobs: BatchJobs) -> int:
    """Count the ended jobs of a batch in the history."""
    query = sa.select(sa.func.count()).where(*batch_jobs.clauses(), jobs.c.state.not_in(("queued", "running")))
    with engine.connect() as connection:
        return connection.execute(query).scalar_one()


def _jobs_of(batch_jobs: BatchJobs) -> sa.Select[*tuple[Any, ...]]:  # Any: as above
    columns = (jobs.c.id, jobs.c.state, jobs.c.reason, jobs.c.error, jobs.c.error_code, jobs.c.model, jobs.c.metadata)
    columns += (jobs.c.record_error,)
    line = (jobs.c.custom_id, jobs.c.line, jobs.c.endpoint)
    is_of_job = sa.and_(results.c.job_id == jobs.c.id, results.c.submitted_ms == jobs.c.submitted_ms)
    with_results = jobs.outerjoin(results, is_of_job)
    later = jobs.alias("later")
    # An expression in place of the column: with the index by batch, SQLite would look at each other job of the batch.
    is_in_queue = later.c.queue.concat("") == batch_jobs.queue
    is_later = sa.and_(is_in_queue, later.c.id == jobs.c.id, later.c.submitted_ms > jobs.c.submitted_ms)
    return (
        sa.select(*columns, *line, jobs.c.finished_ms, results.c.choices, results.c.usage)
        .select_from(with_results)
        .where(*batch_jobs.clauses(), ~sa.exists().where(is_later, later.c.batch == batch_jobs.batch))
        .order_by(jobs.c.submitted_ms, jobs.c.id)
    )


def _write(row: AnyRow, output: TextIO, errors: TextIO) -> str:
    if row.state in ("queued", "running"):
        return "open"
    if row.state == "done" and row.choices is not None:
        _line(output, row, response={"status_code": 200, "request_id": f"req_{row.id}", "body": _body(row)}, error=None)
        return "done"
    _line(errors, row, response=None, error=_error(row))
    return "failed"


def _line(file: TextIO, row: AnyRow, *, response: Object | None, error: Object | None) -> None:
    custom_id = row.custom_id or _metadata(row).get("custom_id", row.id)
    line = {"id": f"batch_req_{row.id}", "custom_id": custom_id, "line": row.line}
    json.dump({**line, "response": response, "error": error}, file, ensure_ascii=False, separators=(",", ":"))
    file.write("\n")


def _error(row: AnyRow) -> Object:
    if row.state == "done":
        why = row.record_error or "the history does not keep results"
        return {"code": "result_not_kept", "message": f"The job is done, but {why}."}
    code = {"cancelled": "batch_cancelled", "expired": "batch_expired"}.get(row.state, row.error_code or "failed")
    return {"code": code, "message": row.error or row.reason or f"The job was {row.state}."}


def _body(row: AnyRow) -> Object:
    is_chat = (row.endpoint or _metadata(row).get("endpoint")) == CHAT_ENDPOINT
    format_body = chat_body if is_chat else completion_body
    result = result_of(row.choices, row.usage, model=row.model)
    return format_body(row.id, result, row.model or "") | {"created": row.finished_ms // 1000}


def _metadata(row: AnyRow) -> Mapping[str, str]:
    return row.metadata or {}


@contextmanager
def _whole(path: Path) -> Generator[TextIO]:
    """Open a temporary file that is renamed to `path` when it is complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
