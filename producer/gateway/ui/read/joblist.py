"""Pages of jobs from the history, newest first. Each page costs the same, however many jobs there are."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import sqlalchemy as sa

from sluice.producer.contract.states import JobState
from sluice.producer.contract.tables import jobs
from sluice.producer.gateway.tables.database import Database

PAGE_JOBS = 50
MAX_TEXT_CHARS = 256
SPANS: Mapping[str, int] = {"hour": 3600, "day": 86_400, "week": 7 * 86_400}
"""Ages that a list may be limited to, in seconds."""

MAX_PRIORITY = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """One job of a list."""

    id: str
    queue: str
    tenant: str
    state: str
    model: str | None
    batch: str | None
    priority: int | None
    error_code: str | None
    attempts: int | None
    submitted_ms: int
    prompt_tokens: int | None
    output_tokens: int | None
    ttft_s: float | None
    e2e_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which jobs a list has. None means any."""

    queues: Sequence[str]
    state: str | None = None
    tenant: str | None = None
    priority: int | None = None
    batch: str | None = None
    error: str | None = None
    span: str | None = None
    is_one_queue: bool = False
    """Whether the address names the queue."""

    after: tuple[int, str] | None = None
    """Submit time and id of the last job of the page before."""

    @property
    def given(self) -> Mapping[str, str]:
        """The filters, as an address has them."""
        names = ("state", "tenant", "priority", "batch", "error", "span")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        queue = {"queue": self.queues[0]} if self.is_one_queue else {}
        return {**{name: str(value) for name, value in found.items()}, **queue}


def wanted_of(given: Mapping[str, str], queues: Sequence[str], tenant: str | None) -> Wanted:
    """Read the filters of an address; what is none is ignored. `tenant`: the only one whose jobs may be listed."""
    texts = {name: text.strip()[:MAX_TEXT_CHARS].replace("\0", "") for name, text in given.items()}
    state, priority, span = texts.get("state"), texts.get("priority", ""), texts.get("span")
    queue = texts.get("queue")
    return Wanted(
        queues=[name for name in queues if name == queue] or list(queues),
        is_one_queue=queue in queues,
        state=state if state in list(JobState) else None,
        tenant=tenant or texts.get("tenant") or None,
        priority=int(priority) if priority in map(str, range(MAX_PRIORITY + 1)) else None,
        batch=texts.get("batch") or None,
        error=texts.get("error") or None,
        span=span if span in SPANS else None,
        after=_place(texts.get("after", "")),
    )


def page_of_jobs(database: Database, wanted: Wanted) -> tuple[list[JobLine], str | None]:
    """Return a page, and the place of the next one; None: there is none."""
    columns = [jobs.c[field.name] for field in fields(JobLine)]
    query = sa.select(*columns).where(*_clauses(wanted)).order_by(jobs.c.submitted_ms.desc(), jobs.c.id)
    with database.reading() as connection:
        rows = connection.execute(query.limit(PAGE_JOBS + 1)).mappings().all()
    found = [JobLine(**{str(name): value for name, value in row.items()}) for row in rows]
    if len(found) <= PAGE_JOBS:
        return found, None
    last = found[PAGE_JOBS - 1]
    return found[:PAGE_JOBS], f"{last.submitted_ms}:{last.id}"


def _clauses(wanted: Wanted) -> list[sa.ColumnElement[bool]]:
    equal = {
        jobs.c.state: wanted.state,
        jobs.c.tenant: wanted.tenant,
        jobs.c.priority: wanted.priority,
        jobs.c.batch: wanted.batch,
        jobs.c.error_code: wanted.error,
    }
    clauses: list[sa.ColumnElement[bool]] = [column == value for column, value in equal.items() if value is not None]
    # A gateway's queues have most jobs: where another filter has an index, that of the queue must not be taken.
    is_selective = any(value is not None for value in (wanted.tenant, wanted.state, wanted.batch, wanted.error))
    clauses.append((jobs.c.queue + "" if is_selective else jobs.c.queue).in_(wanted.queues))
    if wanted.span is not None:
        clauses.append(jobs.c.submitted_ms >= round((time.time() - SPANS[wanted.span]) * 1000))
    if wanted.after is not None:
        at_ms, job_id = wanted.after
        is_same = sa.and_(jobs.c.submitted_ms == at_ms, jobs.c.id > job_id)
        # The first condition says nothing more, but is one that an index serves.
        clauses += [jobs.c.submitted_ms <= at_ms, sa.or_(jobs.c.submitted_ms < at_ms, is_same)]
    return clauses


def _place(text: str) -> tuple[int, str] | None:
    at_ms, _, job_id = text.partition(":")
    return (int(at_ms), job_id) if at_ms.isascii() and at_ms.isdigit() and len(at_ms) <= 15 else None
