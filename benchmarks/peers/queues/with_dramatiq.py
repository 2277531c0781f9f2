"""dramatiq: one process of eight threads, 500 messages prefetched."""

import os

import dramatiq
import ledger
from dramatiq.brokers.redis import RedisBroker

os.environ["dramatiq_queue_prefetch"] = "500"  # noqa: SIM112 - its name
dramatiq.set_broker(RedisBroker(url=ledger.URL))
WORK = ["dramatiq", "with_dramatiq", "--processes", "1", "--threads", "8", "--skip-logging"]


@dramatiq.actor
def record(name: str) -> None:
    """The job."""
    ledger.record(name)


def enqueue(names: list[str]) -> None:
    """Submit one after the other: it has no bulk call."""
    for name in names:
        record.send(name)
