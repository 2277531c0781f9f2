"""The dead set: jobs that failed for good, grouped by error; selected jobs can be requeued or deleted."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.gateway.audit import AuditLog, Entry
from sluice.gateway.errors import bad_request
from sluice.gateway.native.search import queue_named
from sluice.gateway.queues import QueueClients, Queues
from sluice.gateway.ui.frame import CONFIRMATIONS, Form, Frame, after, render
from sluice.gateway.ui.read.deadset import DeadGroup, code_of, groups_of
from sluice.gateway.ui.visitors import Visitor
from sluice.producer.operations.dead import DeadFilter
from sluice.protocol.calls import JobView
from sluice.protocol.wire import JobId

PATH = "/ui/dead"
SLICE_JOBS = 1000

CONFIRMATIONS.update(
    dead_requeued=("good", "The selected jobs wait again."),
    dead_deleted=("good", "The selected jobs are deleted."),
    dead_partly=("bad", "Some of the selected jobs could not be changed: they were requeued or deleted before."),
    dead_none=("bad", "Select at least one job."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The selection in a form: ticked jobs, or all jobs of a group as the page showed it."""

    action: str
    queue: str
    ticked: frozenset[str]
    code: str | None
    """The error of the selected group; None: only the ticked jobs."""

    until_ms: int
    """When the newest job of the shown group failed. Jobs that failed later were not seen, and are not selected."""

    def has(self, view: JobView) -> bool:
        """Return whether a dead job is selected."""
        if self.code is None:
            return view.id in self.ticked
        return code_of(view) == self.code and (view.ended_ms or 0) <= self.until_ms


class DeadPage:
    """The page and its form."""

    def __init__(self, frame: Frame, queues: Queues, audit: AuditLog) -> None:
        self._frame, self._queues, self._audit = frame, queues, audit

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        yield self._frame.page(PATH, self._show)
        yield self._frame.action(PATH, self._change, scope="control")

    async def _show(self, request: Request, visitor: Visitor) -> Response:
        filter_ = DeadFilter(tenant=visitor.tenant)
        dead_by_queue = await asyncio.gather(*(queue.submitting.dead(filter_) for queue in self._queues))
        groups: list[DeadGroup] = []
        for queue, dead in zip(self._queues, dead_by_queue, strict=True):
            groups += groups_of(queue.name, dead)
        return render(request, "dead.html", groups=groups)

    async def _change(self, request: Request, visitor: Visitor, form: Form) -> Response:
        chosen = _chosen(form)
        queue = queue_named(self._queues, chosen.queue)
        jobs = await self._selected(visitor, queue, chosen)
        if not jobs:
            return after(PATH, "dead_none")
        if chosen.action == "delete" and "confirmed" not in form:
            return render(request, "dead_confirm.html", chosen=chosen, groups=groups_of(queue.name, jobs), jobs=jobs)
        ids = [view.id for view in jobs]
        async with self._audit.action(visitor.caller, chosen.action, ids, queue.name) as entry:
            num_changed = await _apply(queue, chosen.action, ids, entry)
        word = "requeued" if chosen.action == "requeue" else "deleted"
        return after(PATH, f"dead_{word}" if num_changed == len(ids) else "dead_partly")

    async def _selected(self, visitor: Visitor, queue: QueueClients, chosen: Chosen) -> list[JobView]:
        """Return the selected jobs that are dead and that the visitor may see."""
        return [view for view in await queue.submitting.dead(DeadFilter(tenant=visitor.tenant)) if chosen.has(view)]


def _chosen(form: Form) -> Chosen:
    action, until = form.get("do", [""])[0], form.get("until", [""])[0]
    if action not in ("requeue", "delete"):
        raise bad_request("choose requeue or delete")
    ticked = form.get("job", [])
    return Chosen(
        action=action,
        queue=form.get("queue", [""])[0],
        ticked=frozenset(ticked),
        # Without JavaScript, "all" may be ticked together with jobs.
        code=form.get("code", [""])[0] if form.get("all") and not ticked else None,
        until_ms=int(until) if re.fullmatch("[0-9]{1,15}", until) else 0,
    )


async def _apply(queue: QueueClients, action: str, ids: Sequence[JobId], entry: Entry) -> int:
    """Requeue or delete jobs; return how many were changed."""
    total = 0
    for at in range(0, len(ids), SLICE_JOBS):
        job_ids, producer = ids[at : at + SLICE_JOBS], queue.submitting
        changed = await (producer.requeue(job_ids) if action == "requeue" else producer.delete(job_ids))
        # Set after each slice, so that the outcomes are right if a later slice fails.
        for job_id, is_changed in zip(job_ids, changed, strict=True):
            entry.outcomes[job_id] = "done" if is_changed else "refused"
        total += sum(changed)
    return total
