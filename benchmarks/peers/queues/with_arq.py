"""arq: uvloop, 256 jobs at a time, poll interval 10 ms, results not kept."""

import asyncio
from collections.abc import Callable

import ledger
import uvloop
from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from arq.worker import Worker, func

SETTINGS = RedisSettings(unix_socket_path=ledger.URL.removeprefix("unix://"))
CHUNK = 64


async def record(_context: object, name: str) -> None:
    """The job."""
    ledger.record(name)


async def _enqueue(pool: ArqRedis, names: list[str]) -> None:
    for at in range(0, len(names), CHUNK):
        await asyncio.gather(*(pool.enqueue_job("record", name) for name in names[at : at + CHUNK]))


async def _enqueue_all(names: list[str]) -> None:
    await _enqueue(await create_pool(SETTINGS), names)


def enqueue(names: list[str]) -> None:
    """Submit many concurrently, as its clients do without a bulk call."""
    uvloop.run(_enqueue_all(names))


def open_single() -> Callable[[str], object]:
    """Submit one."""
    loop = uvloop.new_event_loop()
    pool = loop.run_until_complete(create_pool(SETTINGS))
    return lambda name: loop.run_until_complete(pool.enqueue_job("record", name))


def work() -> None:
    """Serve."""
    uvloop.install()
    asyncio.set_event_loop(uvloop.new_event_loop())
    functions = [func(record, keep_result=0)]
    Worker(functions=functions, redis_settings=SETTINGS, max_jobs=256, poll_delay=0.01, keep_result=0).run()
