"""The table of responses.

A row is written before its job is submitted. It is open until the end of the job is stored: by a gateway that follows
the job, by one that is asked for the response, or by the sweep. The first end is kept. `lost` is the end of a job that
the queue does not know; if the job's end is found later, it replaces `lost`. The row of a job that the queue refused
is deleted, unless a second request with its idempotency key uses it, too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import RowMapping

from sluice.gateway.openai.items import Item
from sluice.gateway.openai.responses import EndStatus, ResponseEnd, ResponseInfo, response_end
from sluice.gateway.tables.database import Database
from sluice.gateway.tables.quota import RESPONSE_BYTES, check_room
from sluice.history.database import compact_json
from sluice.history.tables import jobs, queue_of_id, responses, results
from sluice.protocol.clock import wall_ms
from sluice.protocol.openai_format.bodies import Object
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, Usage

MAX_DEPTH = 64
"""Most responses that a conversation may have before the newest."""

LOST = ResponseEnd(
    status="failed",
    error={"code": "server_error", "message": "the queue no longer has the job, and its output was not kept"},
)
"""The end of a response whose job is unknown."""

_ID = re.compile(r"resp_[A-Za-z0-9_-]{1,64}")
_OPEN, _LOST = "open", "lost"

_COLUMNS = tuple(column for column in responses.columns if column.name != "input")
"""All columns but the input, which may have megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A row of the table."""

    info: ResponseInfo
    tenant: str
    queue: str
    expires_ms: int
    input: Sequence[Item] = ()
    """Empty if it was not read."""

    depth: int = 0
    idempotency_key: str | None = None
    digest: str = ""
    end: ResponseEnd | None = None
    """None while the response is open."""


class ResponseStore:
    """The responses in a database. Thread-safe.

    Args:
        database: The database. Every method raises HistoryUnavailable while it cannot be used.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, new: StoredResponse, max_bytes: int | None = None) -> StoredResponse | None:
        """Add a row; or return the row of an earlier request with the same idempotency key that has not expired.

        Concurrent requests may together exceed `max_bytes` by their size, and outputs are not counted in advance.

        Raises:
            TooManyBytes: the files and responses of its tenant would take more than `max_bytes`.
        """
        values = _row(new)
        if max_bytes is not None:
            self._check_room(new, values["bytes"], max_bytes)
        with self._database.transaction() as connection:
            if new.idempotency_key is not None:  # otherwise this would delete every expired row without a key
                connection.execute(responses.delete().where(*_same(new), responses.c.expires_ms <= wall_ms()))
            kind = postgresql if connection.dialect.name == "postgresql" else sqlite
            insert = kind.insert(responses).values(values)
            # The changed time of expiry makes `withdraw` keep the row for this request.
            upsert = insert.on_conflict_do_update(
                index_elements=["tenant", "idempotency_key"], set_={"expires_ms": responses.c.expires_ms + 1}
            )
            row = connection.execute(upsert.returning(*_COLUMNS)).mappings().one()
            return None if row["id"] == new.info.id else _response(row)

    def _check_room(self, new: StoredResponse, num_bytes: int, max_bytes: int) -> None:
        """Check that there is room for a new row, outside the write's transaction, for which all others wait on SQLite.

        Raises:
            TooManyBytes: there is no room.
        """
        with self._database.reading() as connection:
            if not _is_known(connection, new):
                check_room(connection, new.tenant, num_bytes, max_bytes)

    def withdraw(self, new: StoredResponse) -> None:
        """Delete a row that was added, unless another request with the same idempotency key has found it."""
        is_same = (responses.c.id == new.info.id, responses.c.expires_ms == new.expires_ms)
        with self._database.transaction() as connection:
            connection.execute(responses.delete().where(*is_same))

    def reopen(self, response_id: str) -> None:
        """Reopen a lost response whose job was submitted again."""
        is_lost = (responses.c.id == response_id, responses.c.status == _LOST)
        with self._database.transaction() as connection:
            connection.execute(responses.update().where(*is_lost).values(status=_OPEN, ended_ms=None, error=None))

    def get(self, response_id: str, tenant: str) -> StoredResponse | None:
        """Return a tenant's response; None if it does not exist."""
        if not _ID.fullmatch(response_id):
            return None
        with self._database.reading() as connection:
            row = connection.execute(sa.select(*_COLUMNS).where(*_own(response_id, tenant))).mappings().one_or_none()
        return None if row is None else _response(row)

    def input_of(self, response_id: str, tenant: str) -> Sequence[Item] | None:
        """Return the input of a tenant's response; None if it does not exist."""
        if not _ID.fullmatch(response_id):
            return None
        with self._database.reading() as connection:
            return connection.execute(sa.select(responses.c.input).where(*_own(response_id, tenant))).scalar()

    def conversation(self, response_id: str, tenant: str) -> list[StoredResponse]:
        """Return a tenant's response and all existing responses that it continues, the oldest first."""
        if not _ID.fullmatch(response_id):
            return []
        first = sa.select(responses.c.id, responses.c.previous_id).where(*_own(response_id, tenant))
        chain = first.cte("chain", recursive=True)
        chain = chain.union_all(
            sa.select(responses.c.id, responses.c.previous_id).where(responses.c.id == chain.c.previous_id)
        )
        query = sa.select(responses).where(responses.c.id.in_(sa.select(chain.c.id))).order_by(responses.c.depth)
        with self._database.reading() as connection:
            return [_response(row) for row in connection.execute(query).mappings()]

    def finish(self, ends: Mapping[str, ResponseEnd]) -> None:
        """Store the ends of responses, by id, unless they have one. Any other end replaces `LOST`."""
        with self._database.transaction() as connection:
            for response_id, end in ends.items():
                is_lost = end is LOST
                is_open = responses.c.status.in_((_OPEN,) if is_lost else (_OPEN, _LOST))
                change = responses.update().where(responses.c.id == response_id, is_open)
                output = {"text": end.text, "format": end.format} if end.format else end.text
                values = {"output": output, "usage": end.usage, "error": end.error, "ended_ms": wall_ms()}
                num_bytes = responses.c.bytes + _json_bytes(output)
                connection.execute(change.values(status=_LOST if is_lost else end.status, bytes=num_bytes, **values))

    def delete(self, response_id: str) -> None:
        """Delete a response."""
        with self._database.transaction() as connection:
            connection.execute(responses.delete().where(responses.c.id == response_id))

    def open_after(self, queue: str, response_id: str, limit: int) -> list[StoredResponse]:
        """Return open responses of all tenants of a queue with ids after this one, ordered by id."""
        # As text and not a parameter, so that the partial index is used.
        is_next = (sa.text("status = 'open'"), responses.c.queue == queue, responses.c.id > response_id)
        query = sa.select(*_COLUMNS).where(*is_next).order_by(responses.c.id).limit(limit)
        with self._database.reading() as connection:
            return [_response(row) for row in connection.execute(query).mappings()]

    def recorded(self, queue: str, job_ids: Sequence[JobId]) -> dict[JobId, ResponseEnd]:
        """Return the ends of jobs in the history; those of done jobs only if it has their output."""
        columns = (jobs.c.id, jobs.c.state, jobs.c.error_code, jobs.c.error, results.c.choices, results.c.usage)
        is_same = (results.c.job_id == jobs.c.id) & (results.c.submitted_ms == jobs.c.submitted_ms)
        is_one = (queue_of_id == queue, jobs.c.id.in_(job_ids))
        query = sa.select(*columns).select_from(jobs.outerjoin(results, is_same)).where(*is_one)
        with self._database.reading() as connection:
            rows = connection.execute(query).mappings().all()
        ends = ((JobId(row["id"]), _recorded_end(row)) for row in rows)
        return {job_id: end for job_id, end in ends if end is not None}

    def delete_expired(self, limit: int) -> int:
        """Delete expired responses; return how many."""
        expired = sa.select(responses.c.id).where(responses.c.expires_ms <= wall_ms()).limit(limit)
        with self._database.transaction() as connection:
            return connection.execute(responses.delete().where(responses.c.id.in_(expired))).rowcount


def _own(response_id: str, tenant: str) -> Sequence[sa.ColumnElement[bool]]:
    return (responses.c.id == response_id, responses.c.tenant == tenant, responses.c.expires_ms > wall_ms())


def _same(new: StoredResponse) -> Sequence[sa.ColumnElement[bool]]:
    """Return the conditions on the row of an earlier request with the same idempotency key."""
    return (responses.c.tenant == new.tenant, responses.c.idempotency_key == new.idempotency_key)


def _is_known(connection: sa.Connection, new: StoredResponse) -> bool:
    """Return whether an earlier request had the same idempotency key."""
    if new.idempotency_key is None:
        return False
    query = sa.select(responses.c.id).where(*_same(new), responses.c.expires_ms > wall_ms())
    return connection.execute(query).first() is not None


def _json_bytes(value: object) -> int:
    """Return the size of a value in a JSON column, in bytes."""
    return len(compact_json(value).encode())


def _row(new: StoredResponse) -> Object:
    messages = list(new.input)
    return {
        "id": new.info.id,
        "tenant": new.tenant,
        "queue": new.queue,
        "job_id": new.info.job_id,
        "created_ms": new.info.created_ms,
        "expires_ms": new.expires_ms,
        "previous_id": new.info.previous_id,
        "depth": new.depth,
        "is_background": new.info.is_background,
        "model": new.info.model,
        "options": new.info.options,
        "input": messages,
        "bytes": RESPONSE_BYTES + _json_bytes(messages) + _json_bytes(new.info.options),
        "idempotency_key": new.idempotency_key,
        "digest": new.digest,
        "status": _OPEN,
    }


def _response(row: RowMapping) -> StoredResponse:
    info = ResponseInfo(
        job_id=JobId(row["job_id"]),
        created_ms=row["created_ms"],
        model=row["model"],
        options=row["options"],
        previous_id=row["previous_id"],
        is_background=row["is_background"],
    )
    return StoredResponse(
        info=info,
        tenant=row["tenant"],
        queue=row["queue"],
        expires_ms=row["expires_ms"],
        input=row.get("input", ()),
        depth=row["depth"],
        idempotency_key=row["idempotency_key"],
        digest=row["digest"],
        end=_end(row),
    )


def _recorded_end(row: RowMapping) -> ResponseEnd | None:
    state = JobState(row["state"])
    if not state.is_terminal or (state is JobState.DONE and not row["choices"]):
        return None
    failure = (row["error_code"], row["error"])
    if state is not JobState.DONE:
        return response_end(state, None, ("", ""), None, failure)
    choice = row["choices"][0]
    output = choice["text"], choice.get("format", "")
    return response_end(state, choice["finish_reason"], output, Usage(**row["usage"]), failure)


def _end(row: RowMapping) -> ResponseEnd | None:
    status = cast("Literal['open', 'lost'] | EndStatus", row["status"])
    if status == _OPEN:
        return None
    kept: EndStatus = "failed" if status == "lost" else status
    # A text without marks is stored as it is.
    output = row["output"] if isinstance(row["output"], dict) else {"text": row["output"] or "", "format": ""}
    return ResponseEnd(
        status=kept, text=output["text"], format=output["format"], usage=row["usage"], error=row["error"]
    )
