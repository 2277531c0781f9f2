"""saq: uvloop, concurrency 32, ended jobs not kept, retried after their 60 s."""

import asyncio
from collections.abc import Callable, Coroutine

import ledger
import uvloop
from redis.asyncio import Redis
from saq import Queue, Worker
from saq.queue.redis import RedisQueue

CHUNK = 64


async def record(_context: object, *, name: str) -> None:
    """The job."""
    ledger.record(name)


def _queue() -> Queue:
    return RedisQueue(Redis.from_url(ledger.URL), max_concurrent_ops=CHUNK)


async def _enqueue(names: list[str]) -> None:
    queue = _queue()
    await queue.connect()
    for at in range(0, len(names), CHUNK):
        await asyncio.gather(*(_submit(queue, name) for name in names[at : at + CHUNK]))


def _submit(queue: Queue, name: str) -> Coroutine[object, object, object]:
    return queue.enqueue("record", name=name, ttl=-1, retries=3, timeout=60)


def enqueue(names: list[str]) -> None:
    """Submit many concurrently, as its clients do without a bulk call."""
    uvloop.run(_enqueue(names))


def open_single() -> Callable[[str], object]:
    """Submit one."""
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    queue = _queue()
    loop.run_until_complete(queue.connect())
    return lambda name: loop.run_until_complete(_submit(queue, name))


def work() -> None:
    """Serve."""
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    worker = Worker(_queue(), functions=[record], concurrency=32)
    loop.run_until_complete(worker.start())
