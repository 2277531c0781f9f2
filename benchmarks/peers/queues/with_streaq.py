"""streaq: uvloop, bulk enqueue in one pipeline, concurrency 32, results not kept."""

from collections.abc import Callable

import ledger
import uvloop
from streaq import Worker

worker = Worker(redis_url=ledger.URL, concurrency=32)
CHUNK = 1000
WORK = ["streaq", "run", "with_streaq:worker"]


@worker.task(ttl=0)
async def record(name: str) -> None:
    """The job."""
    ledger.record(name)


async def _enqueue(names: list[str]) -> None:
    async with worker:
        for at in range(0, len(names), CHUNK):
            await worker.enqueue_many([record.enqueue(name) for name in names[at : at + CHUNK]])


def enqueue(names: list[str]) -> None:
    """Submit in bulk."""
    uvloop.run(_enqueue(names))


def open_single() -> Callable[[str], object]:
    """Submit one."""
    loop = uvloop.new_event_loop()
    loop.run_until_complete(worker.__aenter__())

    async def submit(name: str) -> None:
        await record.enqueue(name)

    return lambda name: loop.run_until_complete(submit(name))
