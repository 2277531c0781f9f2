"""A web backend: submit a prompt, stream its tokens by server-sent events, and resume where the browser left off.

    uvicorn docs.examples.sse:app

A browser's EventSource sends the id of the last event that it received as Last-Event-ID when it reconnects. The id
of each event is a cursor of the job's channel, so the stream resumes exactly there, on any backend process.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Body, FastAPI, Header, HTTPException
from fastapi.responses import StreamingResponse

from sluice.producer import AsyncProducer, BadOffset, InvalidJob, JobNotDone, JobNotFound, QueueFull


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
async def events(job_id: str, last_event_id: Annotated[str | None, Header()] = None) -> StreamingResponse:
    """Stream a job's text from the start, or after the last event that the browser received."""
    try:
        await app.state.producer.status(job_id)
    except (JobNotFound, InvalidJob) as unknown:
        raise HTTPException(404, str(unknown)) from unknown

    async def lines() -> AsyncIterator[str]:
        try:
            async for event in app.state.producer.stream(job_id, last_event_id or 0):
                data = json.dumps({"text": event.text, "is_end": event.end is not None})
                yield f"id: {event.cursor}\ndata: {data}\n\n"
        except (JobNotDone, BadOffset) as error:
            yield f"event: failed\ndata: {json.dumps({'error': str(error)})}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
