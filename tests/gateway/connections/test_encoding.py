"""Large answers are encoded while the event loop goes on."""

import asyncio
from threading import Event, get_ident

import pytest

from sluice.gateway.connections.encoding import LARGE_BYTES, encoded_answer


class TestGivenALargeAnswer:
    async def test_when_it_is_encoded_then_the_loop_goes_on(self) -> None:
        may_end = Event()

        def encode() -> bytes:
            return b"{}" if may_end.wait(10) else b"the loop stood still"

        answer = asyncio.create_task(encoded_answer(LARGE_BYTES, encode))
        await asyncio.sleep(0)
        may_end.set()

        assert (await answer).body == b"{}"

    async def test_when_its_encoding_fails_then_the_request_gets_the_error(self) -> None:
        with pytest.raises(ZeroDivisionError):
            await encoded_answer(LARGE_BYTES, lambda: b"%d" % (1 // 0))


class TestGivenASmallAnswer:
    async def test_when_it_is_encoded_then_no_thread_takes_it(self) -> None:
        answer = await encoded_answer(LARGE_BYTES - 1, lambda: b"%d" % get_ident())

        assert answer.body == b"%d" % get_ident()
        assert answer.media_type == "application/json"
