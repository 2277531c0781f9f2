"""rq: SimpleWorker (no fork for each job), JSON, bulk enqueue in one pipeline, no results kept."""

from collections.abc import Callable

import ledger
import redis
from rq import Queue, SimpleWorker
from rq.serializers import JSONSerializer

CHUNK = 1000


def _queue() -> Queue:
    return Queue("bench", connection=redis.Redis.from_url(ledger.URL), serializer=JSONSerializer)


def enqueue(names: list[str]) -> None:
    """Submit in bulk."""
    queue = _queue()
    for at in range(0, len(names), CHUNK):
        queue.enqueue_many(
            [Queue.prepare_data(ledger.record, (name,), result_ttl=0) for name in names[at : at + CHUNK]]
        )


def open_single() -> Callable[[str], object]:
    """Submit one."""
    queue = _queue()
    return lambda name: queue.enqueue(ledger.record, name, result_ttl=0)


def work() -> None:
    """Serve."""
    queue = _queue()
    SimpleWorker([queue], connection=queue.connection, serializer=JSONSerializer).work(logging_level="WARNING")
