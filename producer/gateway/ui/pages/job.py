"""One job: its timeline, its text as it comes, its options and usage; cancel and requeue it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.producer.contract.wire import JobId
from sluice.producer.errors import BadOffset, JobNotDone, JobNotFound, ProducerError, QueueUnreachable
from sluice.producer.gateway.errors import CALLER, HttpError
from sluice.producer.gateway.ownership import unknown_job
from sluice.producer.gateway.queues import QueueClients, Queues
from sluice.producer.gateway.ui.audit import AuditLog
from sluice.producer.gateway.ui.frame import SAID, Form, Frame, after, render
from sluice.producer.gateway.ui.live import Live, Parts, event
from sluice.producer.gateway.ui.read.calls import as_curl, as_python
from sluice.producer.gateway.ui.read.jobs import JobFacts, JobReader, prompt_text
from sluice.producer.gateway.ui.templates import fragment
from sluice.producer.gateway.ui.visitors import Visitor
from sluice.producer.operations.follow import Cursor, cursor_at
from sluice.producer.timeline.picture import LANE_PX, picture
from sluice.producer.timeline.times import times_of

PUSH_EVERY_S = 0.5
LOG = logging.getLogger(__name__)
RECORDED_WITHIN_S = 5.0
"""How long a page waits for the history to have the end of a job."""

SAID.update(
    cancelled=("good", "The job is cancelled."),
    asked=("good", "Its worker was asked to stop the job."),
    requeued=("good", "The job waits again. It goes on after its last token."),
    ended=("bad", "The job had ended before."),
)


class JobPage:
    """The page of one job, its live stream and its buttons."""

    def __init__(self, frame: Frame, live: Live, reader: JobReader, queues: Queues, audit: AuditLog) -> None:
        self._frame, self._live, self._reader = frame, live, reader
        self._queues, self._audit = queues, audit

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        one = "/ui/jobs/{job_id}"
        yield self._frame.page(one, self._show)
        yield self._frame.page(f"{one}/events", self._events)
        yield self._frame.action(f"{one}/cancel", self._cancel, scope="control")
        yield self._frame.action(f"{one}/requeue", self._requeue, scope="control")

    def _id(self, request: Request, visitor: Visitor) -> JobId:
        return self._reader.id_of(visitor, request.path_params["job_id"])

    async def _show(self, request: Request, visitor: Visitor) -> Response:
        facts = await self._reader.find(self._id(request, visitor))
        choices = await self._reader.choices(facts) if facts.is_over else ()
        prompt = await self._reader.prompt(facts)
        base_url = str(request.base_url).rstrip("/")
        curl = as_curl(base_url, facts.queue, prompt, facts.options, has_keys=visitor.token is not None)
        return render(
            request,
            "job.html",
            facts=facts,
            choices=choices,
            prompt=None if prompt is None else prompt_text(prompt),
            curl=curl,
            python=as_python(facts.queue, prompt, facts.options),
            parts=self._parts(facts, visitor),
        )

    def _parts(self, facts: JobFacts, visitor: Visitor) -> Parts:
        row, _, attempts = facts.record or (None, (), ())
        times = times_of(facts.now, row, attempts)
        drawn = None if times is None else picture(times, round(time.time() * 1000))
        values = {"facts": facts, "visitor": visitor, "drawn": drawn, "lane_px": LANE_PX}
        names = {"state": "parts/job_state.html", "timeline": "parts/timeline.html", "facts": "parts/job_facts.html"}
        return {name: fragment(template, **values) for name, template in names.items()}

    # ------------------------------------------------------------ the live stream

    async def _events(self, request: Request, visitor: Visitor) -> Response:
        job_id = self._id(request, visitor)
        queue = await self._reader.queue_of(job_id)
        facts = await self._reader.find(job_id)
        try:
            given = request.headers.get("last-event-id") or request.query_params.get("after") or ""
            cursors = [cursor_at(part) for part in given.split(",")] if given else [cursor_at(0)] * facts.num_choices
        except BadOffset:
            cursors = []
        if len(cursors) != facts.num_choices:
            raise HttpError(400, CALLER, "the position is none of this job", "bad_position")
        return self._live.stream(self._both(request, visitor, facts, queue, cursors))

    async def _both(
        self, request: Request, visitor: Visitor, facts: JobFacts, queue: QueueClients, cursors: list[Cursor]
    ) -> AsyncIterator[bytes]:
        """Yield the text as it comes, and what changes of the page meanwhile."""
        sent: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=100)
        text = asyncio.create_task(_text(queue, facts, cursors, sent))
        rest = asyncio.create_task(self._rest(request, visitor, facts.id, text, sent))
        try:
            while (one := await sent.get()) is not None:
                yield one
        finally:
            for task in (text, rest):
                task.cancel()
            await asyncio.gather(text, rest, return_exceptions=True)

    async def _rest(
        self,
        request: Request,
        visitor: Visitor,
        job_id: JobId,
        text: "asyncio.Task[None]",
        sent: "asyncio.Queue[bytes | None]",
    ) -> None:
        """Send what changes of the page, then that the stream is over, whatever ends it."""
        try:
            await self._watch(request, visitor, job_id, text, sent)
        except HttpError:
            await sent.put(event("end", {}))  # queue and history have forgotten the job
        except Exception:
            LOG.exception("A live stream failed.")
            await sent.put(event("over", {}))
        await sent.put(None)

    async def _watch(
        self,
        request: Request,
        visitor: Visitor,
        job_id: JobId,
        text: "asyncio.Task[None]",
        sent: "asyncio.Queue[bytes | None]",
    ) -> None:
        shown: dict[str, str] = {}
        give_up_s = float("inf")
        while True:
            is_over, is_recorded = False, False
            with suppress(ProducerError):
                facts = await self._reader.find(job_id)
                parts = self._parts(facts, visitor)
                await sent.put(event("parts", {name: html for name, html in parts.items() if shown.get(name) != html}))
                shown.update(parts)
                is_over = facts.is_over and text.done()
                is_recorded = facts.record is not None and facts.record[0].finished_ms is not None
            if is_over:
                give_up_s = min(give_up_s, time.monotonic() + RECORDED_WITHIN_S)
                if is_recorded or time.monotonic() > give_up_s:
                    await sent.put(event("end", {}))
                    break
            if not await self._live.wait(request, visitor, PUSH_EVERY_S):
                await sent.put(event("over", {}))
                break

    # ------------------------------------------------------------ changes

    async def _cancel(self, request: Request, visitor: Visitor, _form: Form) -> Response:
        job_id = self._id(request, visitor)
        queue = await self._reader.queue_of(job_id)
        async with self._audit.action(visitor.caller, "cancel", job_id, queue.name) as entry:
            try:
                entry.outcome = await queue.submitting.cancel(job_id)
            except JobNotFound as error:
                raise unknown_job() from error
        said = entry.outcome if entry.outcome in ("cancelled", "asked") else "ended"
        return after(f"/ui/jobs/{job_id}", said)

    async def _requeue(self, request: Request, visitor: Visitor, _form: Form) -> Response:
        job_id = self._id(request, visitor)
        queue = await self._reader.queue_of(job_id)
        async with self._audit.action(visitor.caller, "requeue", job_id, queue.name):
            [is_requeued] = await queue.submitting.requeue([job_id])
            if not is_requeued:
                raise HttpError(
                    409, CALLER, "only a failed job can be requeued, while the queue has its prompt", "state"
                )
        return after(f"/ui/jobs/{job_id}", "requeued")


async def _text(
    queue: QueueClients, facts: JobFacts, cursors: list[Cursor], sent: "asyncio.Queue[bytes | None]"
) -> None:
    """Send the text of a job; one that ends badly ends here too."""
    try:
        async for one in queue.following.stream_choices(facts.id, len(cursors), cursors):
            cursors[one.choice] = cursor_at(one.cursor)
            data = {"choice": one.choice, "start": one.start, "text": one.text}
            await sent.put(event("output", data, ",".join(map(str, cursors))))
    except JobNotDone:
        return
    except QueueUnreachable:  # for longer than this waits: the page asks again, from its position
        await sent.put(event("over", {}))
        await sent.put(None)
    except ProducerError:
        await sent.put(event("lost", {}))
