"""The events of a job as server-sent events, which any gateway resumes exactly after a `Last-Event-ID`.

The id of an event is the position of each choice after it, separated by commas; the id of the last event is `end`.
"""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from sluice.gateway.connections.events import EventStream
from sluice.gateway.errors import HttpError, bad_request, error_of
from sluice.gateway.native.search import QUEUE, FoundJob, find_job
from sluice.gateway.openapi.document import ERROR
from sluice.gateway.openapi.routes import EVENT, EVENTS, Answer, route, text
from sluice.gateway.openapi.schemas import NUMBER, TEXT, list_of, object_schema, or_null, schema_of
from sluice.gateway.queues import Queues
from sluice.producer.errors import BadOffset, JobNotDone, ProducerError
from sluice.producer.operations.follow import Cursor, Reader, StreamEvent, cursor_at
from sluice.producer.operations.queue import Queue
from sluice.protocol.openai_format.bodies import Object
from sluice.protocol.openai_format.logprobs import logprobs_to_json
from sluice.protocol.states import JobState
from sluice.protocol.wire import End, JobResult, Usage

OVER = "end"
"""Id of the last event. A browser that reconnects with it gets a 204, which stops it."""

OUTPUT = object_schema(
    "Output",
    choice=NUMBER,
    start={**NUMBER, "description": "Tokens of the choice before these."},
    token_ids=list_of(NUMBER),
    text={**TEXT, "description": "New text. It may lag behind the tokens until the end."},
    logprobs={},
    time_ms=NUMBER,
    finish_reason={**or_null(TEXT), "description": "Why the choice ended; null: it continues."},
)
LAST = object_schema(
    "End",
    state={"const": "done"},
    choices=list_of(object_schema(index=NUMBER, finish_reason=or_null(TEXT))),
    usage=schema_of(Usage),
)
LAST_ID = text("Last-Event-ID", "Id of the last event that the client received.", place="header")
AFTER = text("after", "The same, for a client that cannot set headers.")


class EventRoute:
    """The route of a job's events. The job continues if its reader leaves."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    @route(
        "GET /jobs/{job_id}/events",
        {
            200: Answer(
                description="Events `output`, then one `end`; `error` if the job ended badly or cannot be followed.",
                content={EVENTS: EVENT},
                events={"output": OUTPUT, "end": LAST, "error": ERROR},
            ),
            204: Answer(description="The client already has the last event."),
        },
        tag="jobs",
        scope="read",
        errors=(410,),
        parameters=(QUEUE, LAST_ID, AFTER),
    )
    async def answer(self, request: Request) -> Response:
        """Stream the output of a job as server-sent events.

        Raises:
            HttpError: 404, no queue has the job; 400, the position does not belong to it.
            QueueUnreachable: the server does not answer.
        """
        job = await find_job(self._queues, request)
        last = LAST_ID.read(request) or AFTER.read(request) or ""
        if last == OVER:
            return Response(status_code=204)
        cursors = _cursors(job, last)
        return EventStream(_events(job, cursors))


def _cursors(job: FoundJob, last: str) -> list[Cursor]:
    """Read an event's id: the position in each choice."""
    num_choices = job.view.choices
    parts = last.split(",") if last else ["0"] * num_choices
    try:
        cursors = [cursor_at(part) for part in parts]
        for choice, cursor in enumerate(cursors):
            Reader(Queue(job.queue.name), job.id, cursor, choice).check(job.view)
    except BadOffset as error:
        raise _bad_position() from error
    was_requeued = not job.view.state.is_terminal and all(cursor.is_end for cursor in cursors)
    if len(cursors) != num_choices or was_requeued:
        raise _bad_position()
    return cursors


def _bad_position() -> HttpError:
    message = "Last-Event-ID must be the id of an event of this job since it was last requeued"
    return bad_request(message, code="bad_position", param="Last-Event-ID")


async def _events(job: FoundJob, cursors: list[Cursor]) -> AsyncIterator[bytes]:
    """Yield the events after these positions. The last event is `end`, or `error` if the job or the stream failed."""
    ends: list[End | None] = [None] * len(cursors)
    follower = job.queue.following
    try:
        async for event in follower.stream_choices(job.id, len(cursors), cursors):
            cursors[event.choice] = event.position
            ends[event.choice] = event.end
            yield _event("output", ",".join(map(str, cursors)), _output(event))
        last = _last_of_ends(ends) or _last_of_result(await follower.result(job.id))
        yield _event("end", OVER, last)
    except JobNotDone as error:
        yield _event("error", OVER, error_of(error).body)
    except ProducerError as error:
        yield _event("error", None, error_of(error).body)


def _output(event: StreamEvent) -> Object:
    return {
        "choice": event.choice,
        "start": event.start,
        "token_ids": event.token_ids,
        "text": event.text,
        "logprobs": logprobs_to_json(event.logprobs),
        "time_ms": event.time_ms,
        "finish_reason": None if event.end is None else event.end.finish_reason,
    }


def _last_of_ends(ends: Sequence[End | None]) -> Object | None:
    """Format the end of a job whose choices are all done; None if the stream did not contain the end of each."""
    done = [end for end in ends if end is not None and end.state is JobState.DONE]
    usages = [end.usage for end in done if end.usage is not None]
    if len(done) < len(ends) or not usages:
        return None
    # Each end counts the job's tokens up to it, so the largest count is the total.
    return _last([end.finish_reason for end in done], max(usages, key=lambda usage: usage.output_tokens))


def _last_of_result(result: JobResult) -> Object:
    return _last([choice.finish_reason for choice in result.choices], result.usage)


def _last(finish_reasons: Sequence[str | None], usage: Usage) -> Object:
    choices = [{"index": index, "finish_reason": reason} for index, reason in enumerate(finish_reasons)]
    return {"state": JobState.DONE, "choices": choices, "usage": asdict(usage)}


def _event(kind: str, position: str | None, data: Object) -> bytes:
    """Encode one event. Its data are ASCII without line ends, because some clients treat U+2028 as one."""
    lines = [
        f"event: {kind}",
        *([] if position is None else [f"id: {position}"]),
        f"data: {json.dumps(data, separators=(',', ':'))}",
    ]
    return ("\n".join(lines) + "\n\n").encode("ascii")
