"""Read the JSON body and the trace context of requests."""

from starlette.requests import Request

from sluice.gateway.arrival.shares import share_of
from sluice.gateway.errors import error_of
from sluice.gateway.refusals import refusal
from sluice.protocol.bounds import BODY_BYTES, BODY_TEXTS, BODY_VALUES
from sluice.protocol.messages import TRACE_CONTEXT
from sluice.protocol.openai_format.requests import RequestRefused, decoded_json

MAX_CONTAINERS = 200_000
"""Most opening brackets and braces in a body."""


async def read_json(request: Request, max_bytes: int) -> object:
    """Read the body of a request.

    Raises:
        HttpError: the body is larger than `max_bytes`, or not JSON in UTF-8; or all requests use too much memory.
    """
    body, held = bytearray(), share_of(request)
    async for piece in request.stream():
        held.take(len(piece))
        body += piece
        if len(body) > max_bytes:
            raise refusal(BODY_BYTES, f"the body is larger than {max_bytes} bytes")
    return parse_json(body)


def parse_json(body: bytes | bytearray) -> object:
    """Parse a client's JSON within a bounded time, because no other request is served meanwhile.

    Raises:
        HttpError: the body is not JSON in UTF-8, or has too many values.
    """
    # Two quotes a text, but only one is counted of a text that ends with an escaped backslash.
    if body.count(b'"') - body.count(b'\\"') > 2 * BODY_TEXTS.most:
        raise refusal(BODY_TEXTS, f"the body has more than {BODY_TEXTS.most} names and texts")
    if sum(map(body.count, b"[{")) > MAX_CONTAINERS or body.count(b",") > BODY_VALUES.most:
        raise refusal(BODY_VALUES, "the body has too many values")
    try:
        return decoded_json(body, "the body")
    except RequestRefused as error:
        raise error_of(error) from error


def traceparent_of(request: Request) -> str | None:
    """Return the trace context of a request; None if it is missing or not valid."""
    header = request.headers.get("traceparent", "")
    return header if TRACE_CONTEXT.fullmatch(header) else None
