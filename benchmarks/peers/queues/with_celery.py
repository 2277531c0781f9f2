"""celery: a pool of four threads, late acknowledgement, no results, no gossip between workers."""

from collections.abc import Callable

import ledger
from celery import Celery

app = Celery("bench", broker=ledger.URL.replace("unix://", "redis+socket://"))
app.conf.update(task_ignore_result=True, task_acks_late=True, worker_prefetch_multiplier=64, task_serializer="json")
WORK = [
    "celery", "-A", "with_celery", "worker", "-P", "threads", "-c", "4", "-l", "ERROR",
    "--without-gossip", "--without-mingle", "--without-heartbeat",
]  # fmt: skip


@app.task
def record(name: str) -> None:
    """The job."""
    ledger.record(name)


def enqueue(names: list[str]) -> None:
    """Submit one after the other over one producer: it has no bulk call."""
    with app.producer_or_acquire() as producer:
        for name in names:
            record.apply_async((name,), producer=producer)


def open_single() -> Callable[[str], object]:
    """Submit one."""
    return record.delay
