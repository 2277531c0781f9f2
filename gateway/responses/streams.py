"""Stream the events of a response to a reader, from the beginning or after any event."""

import json
from collections.abc import AsyncIterator, Iterable

from sluice.gateway.errors import SERVER, HttpError, bad_request, error_of
from sluice.gateway.openai.response_events import OutputChanged, ResponseEvents
from sluice.gateway.openai.responses import ResponseEnd, response_end
from sluice.gateway.queues import QueueClients
from sluice.gateway.responses.ends import settle
from sluice.gateway.responses.store import ResponseStore, StoredResponse
from sluice.gateway.threads import SQL
from sluice.producer.errors import ChannelExpired, HistoryUnavailable, JobNotFound, ProducerError, ResultExpired
from sluice.protocol.openai_format.bodies import Object
from sluice.protocol.states import JobState
from sluice.protocol.wire import End


class ResponseStream:
    """The stream of one response to one reader. Changes as events are sent.

    Args:
        response: The response at the time of the request.
        queue: The queue of its job; None if the response has ended.
        store: The table in which the end is stored.
        after: The number of the last event that the reader has.
    """

    def __init__(
        self, response: StoredResponse, queue: QueueClients | None, store: ResponseStore, *, after: int = -1
    ) -> None:
        self._response, self._queue, self._store = response, queue, store
        self._events = ResponseEvents(response.info, after)
        self._end = response.end
        self.is_over = False
        """Whether the last event, which may be an error, was sent."""

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events. A stream that cannot continue ends with an error."""
        try:
            for event in self._events.begin():
                yield _sse(event)
            async for events in self._output():
                if events:
                    yield b"".join(map(_sse, events))
            for event in self._events.finish(await self._stored_end()):
                yield _sse(event)
            if self._events.after > self._events.last:
                yield self._error(_too_far(self._events))
        except (ProducerError, HttpError) as error:
            yield self._error(error_of(error) if isinstance(error, ProducerError) else error)
        except OutputChanged:
            yield self._error(HttpError(500, SERVER, "the rest of the output was lost", "output_lost"))
        self.is_over = True

    async def _output(self) -> AsyncIterator[Iterable[Object]]:
        """Yield the events of new output, and read the end, unless it is known."""
        if self._end is not None or self._queue is None:
            return
        try:
            async for entry in self._queue.following.stream_many([self._response.info.job_id]):
                yield self._events.add(entry.text, entry.format)
                if entry.end is not None:
                    self._end = self._end_of(entry.end)
        except (JobNotFound, ResultExpired, ChannelExpired):
            return  # the table may have the end

    def _end_of(self, end: End) -> ResponseEnd:
        failure, output = (end.error_code, end.error), (self._events.text, self._events.format)
        return response_end(end.state, end.finish_reason, output, end.usage, failure)

    async def _stored_end(self) -> ResponseEnd:
        """Return the end, after it was stored: a client that has read it can retrieve the response.

        Raises:
            HttpError: the queue lost the rest of the output, or the job, and the end is not known yet.
        """
        is_new, info = self._response.end is None, self._response.info
        if self._end is None and self._queue is not None and info.is_stored:
            settled = await settle(self._queue.submitting, self._store, [self._response])
            end = settled[info.id]
            self._end, is_new = (None if isinstance(end, JobState) else end), False
        if self._end is None:
            message = "the output cannot be followed: retrieve the response later"
            raise HttpError(503, SERVER, message, "output_unavailable")
        if is_new and info.is_stored:
            await keep_end(self._store, info.id, self._end)
        return self._end

    def _error(self, error: HttpError) -> bytes:
        """Return the event of an error. Its field `error` makes clients raise, so they do not accept the output."""
        about = error.body["error"]
        number = max(self._events.after, self._events.last)
        return _sse({**about, "type": "error", "sequence_number": number, "error": about})


def check_place(response: StoredResponse, after: int) -> None:
    """Check that an ended response has the event after which its reader resumes.

    Raises:
        HttpError: it has fewer events.
    """
    if response.end is None:
        return
    events = ResponseEvents(response.info, after)
    events.begin()
    events.finish(response.end)
    if after > events.last:
        raise _too_far(events)


async def keep_end(store: ResponseStore, response_id: str, end: ResponseEnd) -> None:
    """Store an end if the database can be used; otherwise the sweep does so later."""
    try:
        await SQL.run(store.finish, {response_id: end})
    except HistoryUnavailable:
        return


def _too_far(events: ResponseEvents) -> HttpError:
    return bad_request(
        f"starting_after is {events.after}, and the last event has {events.last}", param="starting_after"
    )


def _sse(event: Object) -> bytes:
    """Encode one event, in ASCII, because httpx treats U+2028 as a line end."""
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
