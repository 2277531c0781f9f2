"""What shared reads cost: channels that have been silent for long are not in every one of them."""

import asyncio
import time
from contextlib import nullcontext

import pytest

from sluice.producer import AsyncProducer
from sluice.producer.errors import QueueUnreachable
from sluice.producer.operations.operation import Ask, Entries, Reply
from sluice.producer.transport import hub
from sluice.producer.transport.hub import MAX_NEW_READS, MAX_UNSEEN_S, Hub, Send
from sluice.producer.transport.links import SlotShare
from sluice.protocol.states import JobState
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

LIVELY_S = 0.4
"""Shorter than in production: the test lasts four times as long."""


def hub_of(send: Send) -> Hub:
    return Hub(send, lambda: nullcontext(send))


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

            monkeypatch.setitem(link._loops.here().shares, None, SlotShare(hub_of(counted)))  # pyright: ignore[reportPrivateUsage] (as above)

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


class HeldReads:
    """A server whose replies are held back until the test gives them."""

    def __init__(self) -> None:
        self.asked = asyncio.Queue[tuple[Ask, asyncio.Future[list[Reply]]]]()

    async def send(self, ask: Ask) -> list[Reply]:
        reply: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((ask, reply))
        return await reply


class TestGivenAReadThatBlocks:
    async def test_when_a_reader_comes_then_it_is_read_for_at_once_and_joins_the_next_read(self) -> None:
        server = HeldReads()
        hub = hub_of(server.send)
        first = asyncio.create_task(hub.read("a", "0-0", 60_000))
        old, old_reply = await server.asked.get()
        second = asyncio.create_task(hub.read("b", "0-0", 60_000))

        new, new_reply = await server.asked.get()
        new_reply.set_result([None])
        old_reply.set_result([None])
        joint, joint_reply = await server.asked.get()
        joint_reply.set_result([[[b"b", [[b"1-0", [b"e", b"x"]]]]]])
        entries = await second
        await hub.close()

        assert [{"a", "b"} & set(ask.commands[0]) for ask in (old, new, joint)] == [{"a"}, {"b"}, {"a", "b"}]
        assert entries == [("1-0", b"x")]
        assert first.cancelled() or not first.done()

    async def test_when_as_many_as_may_end_together_then_a_reader_that_asks_again_is_read_for(self) -> None:
        server = HeldReads()
        hub = hub_of(server.send)
        readers: list[asyncio.Task[object]] = [asyncio.create_task(hub.read("blocks", "0-0", 60_000))]
        await server.asked.get()

        async def read_twice() -> None:
            await hub.read("0", "0-0", 60_000)
            await hub.read("0", "1-0", 60_000)

        readers.append(asyncio.create_task(read_twice()))
        replies = [(await server.asked.get())[1]]
        for number in range(1, MAX_NEW_READS):
            readers.append(asyncio.create_task(hub.read(str(number), "0-0", 60_000)))
            replies.append((await server.asked.get())[1])

        replies[0].set_result([[[b"0", [[b"1-0", [b"e", b"x"]]]]]])
        for reply in replies[1:]:
            reply.set_result([None])
        again, _ = await asyncio.wait_for(server.asked.get(), 10)
        await hub.close()
        await asyncio.gather(*readers, return_exceptions=True)

        assert "0" in again.commands[0]

    async def test_when_a_reply_cannot_be_read_then_its_readers_learn_it(self) -> None:
        server = HeldReads()
        hub = hub_of(server.send)
        reader = asyncio.create_task(hub.read("a", "0-0", 60_000))
        _, reply = await server.asked.get()

        reply.set_result([[[b"a", 5]]])
        [found] = await asyncio.wait_for(asyncio.gather(reader, return_exceptions=True), 10)
        await hub.close()

        assert isinstance(found, TypeError)

    async def test_when_all_reads_fail_then_each_reader_learns_it(self) -> None:
        server = HeldReads()
        hub = hub_of(server.send)
        readers: list[asyncio.Task[Entries]] = []
        replies: list[asyncio.Future[list[Reply]]] = []
        for number in range(1 + MAX_NEW_READS):
            readers.append(asyncio.create_task(hub.read(str(number), "0-0", 60_000)))
            replies.append((await server.asked.get())[1])
        readers.append(asyncio.create_task(hub.read("waits for a read", "0-0", 60_000)))
        await asyncio.sleep(0)

        for reply in replies:
            reply.set_exception(QueueUnreachable("gone"))
        found = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), 10)
        await hub.close()

        assert {type(one) for one in found} == {QueueUnreachable}
