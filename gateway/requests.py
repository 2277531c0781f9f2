"""Read a generation request: its JSON, and what the HTTP response needs beside the job."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request

from sluice.gateway.arrival.shares import share_of
from sluice.gateway.errors import error_of
from sluice.gateway.refusals import refusal
from sluice.protocol.bounds import BODY_BYTES, BODY_TEXTS, BODY_VALUES
from sluice.protocol.jobs import Options, PromptLike
from sluice.protocol.openai_format.requests import Endpoint, RequestRefused, decoded_json, read_request

MAX_CONTAINERS = 200_000
"""Most brackets and braces that open."""

TRACEPARENT = re.compile("00(-[0-9a-f]{32})(-[0-9a-f]{16})(-[0-9a-f]{2})")
"""A W3C trace context."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A request for text, streamed or whole."""

    endpoint: Endpoint
    prompt: PromptLike
    options: Options
    is_stream: bool
    has_usage: bool
    """Whether a stream ends with a chunk that counts tokens."""

    names: Mapping[str, str]
    """The client's names of the prompt, and of options that it calls otherwise."""

    @property
    def model(self) -> str | None:
        """The model that the request names."""
        return self.options.get("model")

    @property
    def is_shared(self) -> bool:
        """Whether other requests may read the same job: they have its idempotency key."""
        return self.options.get("idempotency_key") is not None

    @property
    def num_choices(self) -> int:
        """The number of outputs."""
        return self.options.get("n", 1)


async def read_json(request: Request, max_bytes: int) -> object:
    """Read the body of a request.

    Raises:
        HttpError: it is larger than `max_bytes`, or no JSON in UTF-8; or all requests hold too much.
    """
    body, held = bytearray(), share_of(request)
    async for piece in request.stream():
        held.take(len(piece))
        body += piece
        if len(body) > max_bytes:
            raise refusal(BODY_BYTES, f"the body is larger than {max_bytes} bytes")
    return parse_json(body)


def parse_json(body: bytes | bytearray) -> object:
    """Parse JSON of a client, within a bounded time: no other request is served meanwhile.

    Raises:
        HttpError: it is not JSON in UTF-8, or has too many values.
    """
    # Two quotes each. Of a text that ends with an escaped backslash, this counts one.
    if body.count(b'"') - body.count(b'\\"') > 2 * BODY_TEXTS.most:
        raise refusal(BODY_TEXTS, f"the body has more than {BODY_TEXTS.most} names and texts")
    if sum(map(body.count, b"[{")) > MAX_CONTAINERS or body.count(b",") > BODY_VALUES.most:
        raise refusal(BODY_VALUES, "the body has too many values")
    try:
        return decoded_json(body, "the body")
    except RequestRefused as error:
        raise error_of(error) from error


def traceparent_of(request: Request) -> str | None:
    """Return the trace context of a request; None if it has none that is valid."""
    header = request.headers.get("traceparent", "")
    return header if TRACEPARENT.fullmatch(header) else None


def read_generation(endpoint: Endpoint, body: object, idempotency_key: str | None = None) -> Generation:
    """Check a request.

    Args:
        endpoint: Its path.
        body: Its JSON.
        idempotency_key: A second request with the same key reads the job of the first.

    Raises:
        RequestRefused: a parameter is unknown, not supported or of the wrong type.
    """
    read = read_request(endpoint, body)
    options = {**read.options, "stream": read.is_stream, "idempotency_key": idempotency_key}
    return Generation(endpoint, read.prompt, cast("Options", options), read.is_stream, read.has_usage, read.names)
