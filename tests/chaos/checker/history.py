"""Compare the rows of the history with the queue's data of the same jobs. Uses docs/reference/history.md and SQL."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from tests.chaos.checker.formats import ENDS, Job

AT_A_TIME = 500
SAME = {
    "version": "version", "state": "state", "submitted_ms": "submitted", "finished_ms": "ended",
    "choices": "choices", "priority": "class", "seed": "seed", "batch": "batch", "attempts": "attempt",
    "reason": "reason", "error_code": "error_code",
}  # fmt: skip
"""Column -> field of the job's hash with the same value."""

Row = dict[str, Any]


class History:
    """Reads the tables `jobs`, `attempts` and `results`."""

    def __init__(self, url: str) -> None:
        self._database = sa.create_engine(url)

    def close(self) -> None:
        """Close the connections."""
        self._database.dispose()

    def rows_of(self, job_ids: Sequence[str]) -> dict[str, Row]:
        """Row of each job, with its attempts and its result."""
        found: dict[str, Row] = {}
        with self._database.connect() as connection:
            for at in range(0, len(job_ids), AT_A_TIME):
                found |= _read(connection, job_ids[at : at + AT_A_TIME])
        return found

    def all_ids(self) -> set[str]:
        """Every job that has a row."""
        with self._database.connect() as connection:
            return set(connection.execute(sa.text("SELECT id FROM jobs")).scalars())


def _read(connection: sa.Connection, job_ids: Sequence[str]) -> dict[str, Row]:
    def select(table: str, key: str) -> list[Row]:
        query = sa.text(f"SELECT * FROM {table} WHERE {key} IN :ids").bindparams(sa.bindparam("ids", expanding=True))
        return [dict(row) for row in connection.execute(query, {"ids": list(job_ids)}).mappings()]

    rows: dict[str, Row] = {row["id"]: row | {"claims": [], "result": None} for row in select("jobs", "id")}
    for claim in select("attempts", "job_id"):
        if claim["job_id"] in rows:
            rows[claim["job_id"]]["claims"].append(claim)
    for result in select("results", "job_id"):
        if result["job_id"] in rows:
            rows[result["job_id"]]["result"] = result
    return rows


def check_row(job: Job, row: Row | None) -> Iterator[str]:
    """Yield findings about the row of a job that has ended."""
    if row is None:
        yield "row: the history has none"
        return
    for column, field in SAME.items():
        written, true = str(row[column] if row[column] is not None else ""), job.fields.get(field, "")
        if written != true and not (column == "attempts" and {written, true} <= {"", "0"}):
            yield f"row: {column} is {written!r} and the job's {field} is {true!r}"
    if row["output_tokens"] is not None and row["output_tokens"] != job.number("output"):
        yield f"row: output_tokens is {row['output_tokens']} and the job has {job.number('output')}"
    if row["record_error"]:
        yield f"row: parts were refused: {row['record_error']}"
    yield from _check_claims(job, row["claims"])
    yield from _check_result(job, row["result"])


def _check_claims(job: Job, claims: list[Row]) -> Iterator[str]:
    """One row for each claim, and at most one of them ended the job."""
    epochs = sorted(claim["epoch"] for claim in claims)
    if epochs != list(range(1, job.number("epoch") + 1)):
        yield f"attempts: the history has the epochs {epochs} and the job had {job.number('epoch')}"
    ended = [claim["epoch"] for claim in claims if claim["outcome"] in ENDS]
    if len(ended) > 1:
        yield f"attempts: the claims {ended} each ended it"
    open_ones = [claim["epoch"] for claim in claims if claim["outcome"] is None]
    if open_ones:
        yield f"attempts: the claims {open_ones} never ended"


def _check_result(job: Job, result: Row | None) -> Iterator[str]:
    if job.state != "done" or job.result is None or result is None:
        return
    choices = json.loads(result["choices"]) if isinstance(result["choices"], str) else result["choices"]
    kept = [(choice["text"], tuple(choice["token_ids"]), choice.get("finish_reason")) for choice in choices]
    if kept != [(choice.text, choice.ids, choice.finish) for choice in job.result]:
        yield "row: its result is not the queue's"
