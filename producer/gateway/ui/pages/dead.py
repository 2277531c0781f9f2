"""The dead set: jobs that failed for good, in groups of the same error; requeue or delete them by selection."""

import asyncio
from collections.abc import Iterator, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.producer.contract.wire import JobId
from sluice.producer.gateway.errors import bad_request
from sluice.producer.gateway.native.search import unknown_queue
from sluice.producer.gateway.queues import QueueClients, Queues
from sluice.producer.gateway.ui.audit import AuditLog, Entry
from sluice.producer.gateway.ui.frame import SAID, Form, Frame, after, render
from sluice.producer.gateway.ui.read.deadset import DeadGroup, code_of, groups_of
from sluice.producer.gateway.ui.visitors import Visitor
from sluice.producer.operations.dead import DeadFilter

PATH = "/ui/dead"
SLICE_JOBS = 1000

SAID.update(
    dead_requeued=("good", "The selected jobs wait again."),
    dead_deleted=("good", "The selected jobs are deleted."),
    dead_partly=("bad", "Some of the selected jobs could not be changed: they were requeued or deleted before."),
    dead_none=("bad", "Select at least one job."),
)


class DeadPage:
    """The page and its form."""

    def __init__(self, frame: Frame, queues: Queues, audit: AuditLog) -> None:
        self._frame, self._queues, self._audit = frame, queues, audit

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        yield self._frame.page(PATH, self._show)
        yield self._frame.action(PATH, self._change, scope="control")

    async def _show(self, request: Request, visitor: Visitor) -> Response:
        wanted = DeadFilter(tenant=visitor.tenant)
        found = await asyncio.gather(*(queue.submitting.dead(wanted) for queue in self._queues))
        groups: list[DeadGroup] = []
        for queue, dead in zip(self._queues, found, strict=True):
            groups += groups_of(queue.name, dead)
        return render(request, "dead.html", groups=groups)

    async def _change(self, request: Request, visitor: Visitor, form: Form) -> Response:
        del request
        action = form.get("do", [""])[0]
        if action not in ("requeue", "delete"):
            raise bad_request("choose requeue or delete")
        try:
            queue = self._queues[form.get("queue", [""])[0]]
        except KeyError as error:
            raise unknown_queue() from error
        ticked = form.get("job", [])
        # Without scripts, "all" stays ticked beside jobs.
        code = form.get("code", [""])[0] if form.get("all") and not ticked else None
        ids = await self._selected(visitor, queue, ticked, code)
        if not ids:
            return after(PATH, "dead_none")
        async with self._audit.action(visitor.caller, action, ids, queue.name) as entry:
            num_changed = await _apply(queue, action, ids, entry)
        word = "requeued" if action == "requeue" else "deleted"
        return after(PATH, f"dead_{word}" if num_changed == len(ids) else "dead_partly")

    async def _selected(
        self, visitor: Visitor, queue: QueueClients, given: Sequence[str], code: str | None
    ) -> list[JobId]:
        """Return the jobs that were ticked, or all of a group; only those in the dead set that the visitor may see."""
        dead = await queue.submitting.dead(DeadFilter(tenant=visitor.tenant))
        if code is not None:
            return [view.id for view in dead if code_of(view) == code]
        ticked = {*given}
        return [view.id for view in dead if view.id in ticked]


async def _apply(queue: QueueClients, action: str, ids: Sequence[JobId], entry: Entry) -> int:
    """Requeue or delete jobs, and return how many were."""
    total = 0
    for at in range(0, len(ids), SLICE_JOBS):
        some, producer = ids[at : at + SLICE_JOBS], queue.submitting
        changed = await (producer.requeue(some) if action == "requeue" else producer.delete(some))
        # Of each, so that they are right if a later slice fails.
        for job_id, is_changed in zip(some, changed, strict=True):
            entry.outcomes[job_id] = "done" if is_changed else "refused"
        total += sum(changed)
    return total
