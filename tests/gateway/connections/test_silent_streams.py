"""Streams without events: comments keep their connections alive, and no client reads them as events."""

import asyncio
from collections.abc import AsyncIterator

import httpx2  # that of openai
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from sluice.gateway.connections import events
from sluice.gateway.connections.events import COMMENT, EventStream

CHUNK = b'data: {"id":"a","object":"text_completion","created":0,"model":"m","choices":[]}\n\n'


class SilentUntilCommented:
    """An ASGI application: a stream whose second event comes after some comments."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self._is_heard = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer any request."""

        async def noted(message: Message) -> None:
            self.sent.append(message)
            if self.num_comments >= 3:
                self._is_heard.set()
            await send(message)

        await EventStream(self._events())(scope, receive, noted)

    @property
    def num_comments(self) -> int:
        """How many were sent."""
        return sum(message.get("body") == COMMENT for message in self.sent)

    async def _events(self) -> AsyncIterator[bytes]:
        yield CHUNK
        await self._is_heard.wait()
        yield CHUNK
        yield b"data: [DONE]\n\n"


class TestGivenAStreamThatIsSilent:
    async def test_when_time_passes_then_openais_client_reads_its_events_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(events, "SILENCE_S", 0.02)
        app = SilentUntilCommented()
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client:
            stream = await client.completions.create(model="m", prompt="x", stream=True, timeout=30)

            read = [chunk.id async for chunk in stream]

        assert read == ["a", "a"]
        assert app.num_comments >= 3
        assert not app.sent[-1]["more_body"]

    async def test_when_events_come_in_time_then_there_are_no_comments(self) -> None:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def two() -> AsyncIterator[bytes]:
            yield CHUNK
            yield CHUNK

        await EventStream(two()).stream_response(send)

        assert [message.get("body") for message in sent] == [None, CHUNK, CHUNK, b""]
