"""Read responses."""

import time
from collections.abc import Callable, Iterable

import openai
from openai.types.responses import Response, ResponseStreamEvent


def text_of(events: Iterable[ResponseStreamEvent]) -> str:
    """The text of a stream's deltas."""
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def wait_until_ended(client: openai.OpenAI, response_id: str) -> Response:
    """Ask for a response until it has ended."""
    found: list[Response] = []

    def is_ended() -> bool:
        found.append(client.responses.retrieve(response_id))
        return found[-1].status not in ("queued", "in_progress")

    wait_for(is_ended)
    return found[-1]


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
