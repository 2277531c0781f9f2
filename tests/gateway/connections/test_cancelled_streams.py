"""A stream that is cancelled before its first event."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from sluice.gateway.generation import begun
from sluice.producer.errors import QueueUnreachable


class Events:
    """The events of a job that has none. They end as `end` says when they are cancelled."""

    def __init__(self, end: str) -> None:
        self._end = end
        self.has_left = False

    async def __call__(self) -> AsyncGenerator[bytes]:
        """Yield them."""
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            if self._end == "failed":
                raise QueueUnreachable("away") from None
            if self._end == "cancelled":
                raise
            yield b"late"
        finally:
            self.has_left = True


class TestGivenARequestThatWaitsForItsFirstEvent:
    @pytest.mark.parametrize("end", ["cancelled", "failed", "dropped"])
    async def test_when_it_is_cancelled_then_its_events_have_ended_and_no_error_is_lost(self, end: str) -> None:
        lost: list[dict[str, Any]] = []  # Any: what asyncio reports
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: lost.append(context))
        events = Events(end)
        stream = events()
        waiting = asyncio.ensure_future(begun(stream))
        await asyncio.sleep(0.01)

        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

        assert events.has_left
        gc.collect()
        assert lost == []
