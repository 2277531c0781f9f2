"""A web backend: submit a prompt, stream its tokens by server-sent events, and resume where the browser left off.

    uvicorn docs.examples.sse:app

A browser's EventSource sends the id of the last event that it received as Last-Event-ID when it reconnects. The id
of each event is a cursor of the job's channel, so the stream resumes exactly there, on any backend process. The id of
the last event is `end`: a browser that has it is told not to come back.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Body, FastAPI, Header, HTTPException
from fastapi.responses import Response, StreamingResponse

from sluice.producer import (
    AsyncProducer,
    BadOffset,
    ChannelExpired,
    InvalidJob,
    JobNotFound,
    ProducerError,
    QueueFull,
    QueueUnreachable,
    ResultExpired,
    StreamEvent,
)

STATUS: dict[type, int] = {BadOffset: 400, InvalidJob: 404, JobNotFound: 404, ResultExpired: 410, ChannelExpired: 410}
"""Statuses of errors; of others 503. After any but 200, EventSource does not come back by itself."""


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open one producer for the process: all requests share its connections."""
    async with AsyncProducer() as producer:
        app.state.producer = producer
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/jobs", status_code=202)
async def submit(
    prompt: Annotated[str, Body()],
    max_tokens: Annotated[int, Body()] = 200,
    idempotency_key: Annotated[str | None, Body()] = None,
) -> dict[str, str]:
    """Submit a prompt; the job continues after this request and this process have ended."""
    try:
        receipt = await app.state.producer.submit(
            messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, idempotency_key=idempotency_key
        )
    except InvalidJob as invalid:
        raise HTTPException(422, str(invalid)) from invalid
    except QueueFull as full:
        wait_s = str(round(full.retry_after_s))
        raise HTTPException(503, str(full), headers={"Retry-After": wait_s}) from full
    return {"id": receipt.id}


@app.get("/jobs/{job_id}/events")
async def events(job_id: str, last_event_id: Annotated[str | None, Header()] = None) -> Response:
    """Stream a job's text from the start, or after the last event that the browser received."""
    if last_event_id == "end":
        return Response(status_code=204)
    try:
        status = await app.state.producer.status(job_id)
        output = app.state.producer.stream(job_id, last_event_id or 0)
        # The output of a job that has ended comes at once, or is gone.
        first = await anext(output, None) if status.state.is_terminal else None
    except ProducerError as error:
        raise HTTPException(STATUS.get(type(error), 503), str(error)) from error
    return StreamingResponse(_lines(first, output), media_type="text/event-stream")


async def _lines(first: StreamEvent | None, output: AsyncIterator[StreamEvent]) -> AsyncIterator[str]:
    try:
        if first is not None:
            yield _line(first)
        async for event in output:
            yield _line(event)
    except QueueUnreachable:
        return  # the browser comes back, and goes on where it was
    except ProducerError as error:
        yield f"id: end\nevent: failed\ndata: {json.dumps({'error': str(error)})}\n\n"


def _line(event: StreamEvent) -> str:
    data = json.dumps({"text": event.text, "is_end": event.end is not None})
    return f"id: {'end' if event.end else event.cursor}\ndata: {data}\n\n"
