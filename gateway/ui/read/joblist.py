"""Pages of jobs from the history, newest first. The cost of a page does not depend on the number of jobs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from sluice.gateway.tables.database import Database
from sluice.history.filters import JobFilter, JobPlace
from sluice.history.tables import jobs
from sluice.protocol.limits import MAX_PRIORITY
from sluice.protocol.states import RECORDED

PAGE_JOBS = 50
MAX_TEXT_CHARS = 256
SPANS: Mapping[str, int] = {"hour": 3600, "day": 86_400, "week": 7 * 86_400}
"""Selectable maximum ages of jobs, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """One row of the list."""

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
class JobListQuery:
    """The filters of a list. None: any."""

    queues: Sequence[str]
    state: str | None = None
    tenant: str | None = None
    priority: int | None = None
    batch: str | None = None
    error: str | None = None
    span: str | None = None
    is_one_queue: bool = False
    """Whether the URL names the queue."""

    after: JobPlace | None = None
    """The last job of the previous page."""

    @property
    def filter(self) -> JobFilter:
        """The filters as a query of the history, as of now."""
        return JobFilter(
            queue=self.queues,
            batch=self.batch,
            state=self.state,
            tenant=self.tenant,
            priority=self.priority,
            error_code=self.error,
            since_ms=None if self.span is None else round((time.time() - SPANS[self.span]) * 1000),
            after=self.after,
        )

    @property
    def parameters(self) -> Mapping[str, str]:
        """The filters as parameters of a URL."""
        names = ("state", "tenant", "priority", "batch", "error", "span")
        filters = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        queue = {"queue": self.queues[0]} if self.is_one_queue else {}
        return {**{name: str(value) for name, value in filters.items()}, **queue}


def read_query(parameters: Mapping[str, str], queues: Sequence[str], tenant: str | None) -> JobListQuery:
    """Read the filters of a URL, ignoring invalid ones. `tenant`: the only tenant whose jobs may be listed."""
    texts = {name: text.strip()[:MAX_TEXT_CHARS].replace("\0", "") for name, text in parameters.items()}
    state, priority, span = texts.get("state"), texts.get("priority", ""), texts.get("span")
    queue = texts.get("queue")
    return JobListQuery(
        queues=[name for name in queues if name == queue] or list(queues),
        is_one_queue=queue in queues,
        state=state if state in RECORDED else None,
        tenant=tenant or texts.get("tenant") or None,
        priority=int(priority) if priority in map(str, range(MAX_PRIORITY + 1)) else None,
        batch=texts.get("batch") or None,
        error=texts.get("error") or None,
        span=span if span in SPANS else None,
        after=JobPlace.read(texts.get("after", "")),
    )


def page_of_jobs(database: Database, query: JobListQuery) -> tuple[list[JobLine], str | None]:
    """Return a page, and the place of the next one; None if there is none."""
    columns = [jobs.c[field.name] for field in fields(JobLine)]
    with database.reading() as connection:
        rows = connection.execute(query.filter.newest_first(columns).limit(PAGE_JOBS + 1)).mappings().all()
    lines = [JobLine(**{str(name): value for name, value in row.items()}) for row in rows]
    if len(lines) <= PAGE_JOBS:
        return lines, None
    last = lines[PAGE_JOBS - 1]
    return lines[:PAGE_JOBS], str(JobPlace(last.submitted_ms, last.id))
