"""taskiq over Redis streams: uvloop, 256 entries per read and tasks at a time, late acknowledgement, no results."""

import asyncio

import ledger
import uvloop
from taskiq_redis import RedisStreamBroker

# From "0": by default its group begins at "$", and jobs submitted before the first worker would never run.
broker = RedisStreamBroker(ledger.URL, consumer_id="0", xread_count=256)
CHUNK = 64
WORK = [
    "taskiq", "worker", "with_taskiq:broker", "--workers", "1", "--max-async-tasks", "256", "--max-prefetch", "256",
    "--ack-type", "when_executed", "--log-level", "ERROR",
]  # fmt: skip


@broker.task
async def record(name: str) -> None:
    """The job."""
    ledger.record(name)


async def _enqueue(names: list[str]) -> None:
    await broker.startup()
    for at in range(0, len(names), CHUNK):
        await asyncio.gather(*(record.kiq(name) for name in names[at : at + CHUNK]))


def enqueue(names: list[str]) -> None:
    """Submit many concurrently, as its clients do without a bulk call."""
    uvloop.run(_enqueue(names))
