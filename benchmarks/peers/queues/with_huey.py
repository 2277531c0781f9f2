"""huey: four threads, blocking reads, no results and no periodic tasks."""

import ledger
import redis
from huey import RedisHuey

huey = RedisHuey("bench", connection_pool=redis.ConnectionPool.from_url(ledger.URL), results=False)
WORK = ["huey_consumer", "with_huey.huey", "-w", "4", "-k", "thread", "-n", "-q"]


@huey.task()
def record(name: str) -> None:
    """The job."""
    ledger.record(name)


def enqueue(names: list[str]) -> None:
    """Submit one after the other: it has no bulk call."""
    for name in names:
        record(name)
