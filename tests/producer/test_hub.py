"""What shared reads cost: channels that have been silent for long are not in every one of them."""

import asyncio
import time

import pytest

from sluice.producer import AsyncProducer
from sluice.producer.contract.states import JobState
from sluice.producer.operations.operation import Ask, Reply
from sluice.producer.transport import hub
from sluice.producer.transport.hub import MAX_UNSEEN_S, Hub
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

LIVELY_S = 0.4
"""Shorter than in production: the test lasts four times as long."""


class TestGivenOneReaderThatHearsMuchAndManyThatHearNothing:
    async def test_when_some_were_silent_for_long_then_most_reads_omit_them(
        self, valkey: RedisServer, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hub, "LIVELY_S", LIVELY_S)
        asked: list[int] = []

        async with AsyncProducer(valkey.url) as producer:
            receipts = [await producer.submit(f"prompt {number}") for number in range(20)]
            leased = worker.pull(1000)
            talking, silent = leased[0], leased[1]
            received_s: list[float] = []
            link = producer._link  # pyright: ignore[reportPrivateUsage] (its reads are counted)

            async def counted(ask: Ask) -> list[Reply]:
                asked.append(len(ask.commands[0]))
                return await link.ask_blocking(ask)

            monkeypatch.setattr(link, "_hub", Hub(counted))

            async def listen(number: int) -> None:
                async for _ in producer.stream(receipts[number]):
                    received_s.append(time.monotonic())

            readers = [asyncio.create_task(listen(number)) for number in range(20)]
            for number in range(150):
                worker.say(talking, [number], "x")
                if number == 75:
                    asked.clear()
                await asyncio.sleep(2 * LIVELY_S / 75)
            sizes, all_of_them = list(asked), max(asked)
            received_s.clear()
            said_s = time.monotonic()
            worker.say(silent, [1], "a", end=JobState.DONE)
            await asyncio.wait_for(readers[1], 60)
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

        assert sizes
        assert sum(sizes) / len(sizes) < 0.7 * all_of_them
        assert received_s[0] - said_s < 2 * MAX_UNSEEN_S
