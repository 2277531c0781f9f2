"""Waits for an answer whose client leaves."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from sluice.gateway.readers import unless_left


def left() -> Request:
    """A request whose client has left."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    return Request({"type": "http"}, receive)


async def deaf(error: Exception) -> None:
    """Fail after a cancellation that is dropped, as redis-py may."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(0)
        raise error from None


class TestGivenAClientThatLeaves:
    async def test_when_the_cancelled_wait_fails_then_nobody_hears_of_it(self) -> None:
        heard: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: heard.append(context))
        num_left: list[None] = []

        answer = await unless_left(left(), deaf(RuntimeError("the job was cancelled")), lambda: num_left.append(None))
        for _ in range(5):
            await asyncio.sleep(0)

        assert (answer, len(num_left), heard) == (None, 1, [])

    async def test_when_the_answer_fails_first_then_the_error_is_raised(self) -> None:
        async def fail() -> None:
            raise RuntimeError("it failed")

        async def stay() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        with pytest.raises(RuntimeError, match="it failed"):
            await unless_left(Request({"type": "http"}, stay), fail(), lambda: None)
