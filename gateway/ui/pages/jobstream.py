"""The live stream of a job's page: its text as it arrives, and the other parts when they change."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from starlette.requests import Request

from sluice.gateway.errors import CALLER, HttpError
from sluice.gateway.openai.items import OutputItem, items_of
from sluice.gateway.ownership import unknown_job
from sluice.gateway.queues import QueueClients, Queues
from sluice.gateway.ui.live import Live, Parts, event
from sluice.gateway.ui.read.jobs import JobFacts, JobReader, Watched
from sluice.gateway.ui.templates import fragment
from sluice.gateway.ui.visitors import Visitor
from sluice.producer.errors import BadOffset, JobNotDone, ProducerError, QueueUnreachable
from sluice.producer.operations.follow import Cursor, StreamEvent, cursor_at
from sluice.producer.timeline.picture import LANE_PX, picture
from sluice.producer.timeline.times import times_of
from sluice.protocol.clock import wall_ms
from sluice.protocol.outputs.formats import OutputFormat
from sluice.protocol.outputs.parser import OutputParser, Part
from sluice.protocol.wire import ChoiceResult, JobId

PUSH_EVERY_S, RECORD_EVERY_S = 2.0, 0.5
"""Time between two reads of a job: while it runs, and until the history has its end. Text is sent at once."""

LOG = logging.getLogger(__name__)


def job_parts(facts: JobFacts, visitor: Visitor) -> Parts:
    """Return the parts of the page that change while a job runs."""
    row, attempts = facts.record or (None, ())
    times = times_of(facts.now, row, attempts)
    drawn = None if times is None else picture(times, wall_ms())
    values = {"facts": facts, "visitor": visitor, "drawn": drawn, "lane_px": LANE_PX}
    names = {"state": "parts/job_state.html", "timeline": "parts/timeline.html", "facts": "parts/job_facts.html"}
    return {name: fragment(template, **values) for name, template in names.items()}


def shown_items(choice: ChoiceResult) -> list[OutputItem]:
    """Return the items that a page shows of an output; none if its text marks nothing."""
    return items_of(choice.format, choice.text) if choice.format else []


class ChoiceText:
    """The text of a choice for a page that may have its beginning. Mutable.

    It is read from the beginning, because what a mark means depends on the text before it.
    """

    def __init__(self, num_shown: int) -> None:
        self._num_hidden = num_shown
        """Characters to come that the page has."""

        self._parser: OutputParser | None = None

    def add(self, output: StreamEvent) -> Mapping[str, object]:
        """Return what an event adds to the page: `text`, and `parts` if the text has marks."""
        if self._parser is None and output.format:
            self._parser = OutputParser(OutputFormat.read(output.format))
        hidden, text = output.text[: self._num_hidden], output.text[self._num_hidden :]
        self._num_hidden -= len(hidden)
        if self._parser is None:
            return {"text": text}
        self._parser.push(hidden)
        parts = [*self._parser.push(text), *(self._parser.finish() if output.end is not None else ())]
        return {"text": text, "parts": list(map(_part, parts))}


def _part(part: Part) -> Mapping[str, str]:
    return {"kind": part.kind, "text": part.text}


class TextFeed:
    """The output text of a job, sent to a page. Changes: events are put into `sent`."""

    def __init__(self, queue: QueueClients, job_id: JobId, cursors: list[Cursor]) -> None:
        self.sent: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=100)
        self.turned = asyncio.Event()
        """Set when the text begins and when it ends, because the state of the job has changed then."""

        self.is_over = False
        self._queue, self._job_id, self._cursors = queue, job_id, cursors

    async def send(self) -> None:
        """Send the text until it ends, in whatever way."""
        try:
            await self._send()
        except JobNotDone:
            pass
        except QueueUnreachable:  # for longer than the client waits: the page reconnects from its position
            await self.sent.put(event("over", {}))
            await self.sent.put(None)
        except ProducerError:
            await self.sent.put(event("lost", {}))
        finally:
            self.is_over = True
            self.turned.set()

    async def _send(self) -> None:
        cursors, has_begun = self._cursors, False
        texts = [ChoiceText(cursor.chars or 0) for cursor in cursors]
        async for output in self._queue.following.stream_choices(self._job_id, len(cursors)):
            added = texts[output.choice].add(output)
            if output.position <= cursors[output.choice]:
                continue  # the page has it
            cursors[output.choice] = output.position
            data = {"choice": output.choice, "start": output.start, **added}
            await self.sent.put(event("output", data, ",".join(map(str, cursors))))
            if not has_begun:
                has_begun = True
                self.turned.set()


class JobStream:
    """The source of the jobs' streams."""

    def __init__(self, live: Live, reader: JobReader, queues: Queues) -> None:
        self._live, self._reader, self._queues = live, reader, queues

    async def events(self, request: Request, visitor: Visitor) -> AsyncIterator[bytes]:
        """Return the events of the job that a request names, after the request's position.

        Raises:
            HttpError: 404, no queue has the job. 400, the position does not belong to the job.
        """
        facts = await self._reader.find(self._reader.id_of(visitor, request.path_params["job_id"]))
        if facts.now is None:
            raise unknown_job()
        try:
            last_id = request.headers.get("last-event-id") or request.query_params.get("after") or ""
            parts = last_id.split(",") if last_id else ["0"] * facts.num_choices
            cursors = [cursor_at(part) for part in parts]
        except BadOffset:
            cursors = []
        if len(cursors) != facts.num_choices or any(cursor.chars is None for cursor in cursors):
            raise HttpError(400, CALLER, "the position does not belong to this job", "bad_position")
        watched = Watched(self._reader, self._queues[facts.queue], facts)
        text = TextFeed(self._queues[facts.queue], facts.id, cursors)
        return self._both(request, visitor, watched, text)

    async def _both(self, request: Request, visitor: Visitor, watched: Watched, text: TextFeed) -> AsyncIterator[bytes]:
        """Yield new text, and the parts of the page that change meanwhile."""
        tasks = [asyncio.create_task(text.send()), asyncio.create_task(self._rest(request, visitor, watched, text))]
        try:
            while (part := await text.sent.get()) is not None:
                yield part
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _rest(self, request: Request, visitor: Visitor, watched: Watched, text: TextFeed) -> None:
        """Send the changed parts of the page, then the last event, after errors, too."""
        last = event("over", {})
        try:
            if await self._watch(request, visitor, watched, text):
                last = event("end", {})
        except HttpError:
            last = event("end", {})  # queue and history have forgotten the job
        except Exception:
            LOG.exception("A live stream failed.")
        await text.sent.put(last)
        await text.sent.put(None)

    async def _watch(self, request: Request, visitor: Visitor, watched: Watched, text: TextFeed) -> bool:
        """Send the changed parts; return True once no more will change, False if the stream must end earlier."""
        shown: dict[str, str] = {}
        while True:
            parts = job_parts(watched.facts, visitor)
            changed = {name: html for name, html in parts.items() if shown.get(name) != html}
            await text.sent.put(event("parts", changed))
            shown.update(changed)
            if text.is_over and watched.is_settled:
                return True
            every_s = RECORD_EVERY_S if text.is_over else PUSH_EVERY_S
            if not await self._live.wait(request, visitor, every_s, text.turned):
                return False
            with suppress(ProducerError):
                await watched.look()
