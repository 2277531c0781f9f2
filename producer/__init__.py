"""The client side of Sluice: submit jobs, follow their tokens, ask for results. Needs no torch.

from producer import Producer, AsyncProducer
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from producer.aio import AsyncProducer
    from producer.client import Producer
    from producer.commands import JobStatus, Receipt
    from producer.following import Cursor, StreamEvent
    from producer.jobs import Job, Options, job
    from producer.outcomes import Outcome

__all__ = [
    "AsyncProducer",
    "Cursor",
    "Job",
    "JobStatus",
    "Options",
    "Outcome",
    "Producer",
    "Receipt",
    "StreamEvent",
    "job",
]

_HOMES = {
    "AsyncProducer": "producer.aio",
    "Producer": "producer.client",
    "JobStatus": "producer.commands",
    "Receipt": "producer.commands",
    "Cursor": "producer.following",
    "StreamEvent": "producer.following",
    "Job": "producer.jobs",
    "Options": "producer.jobs",
    "job": "producer.jobs",
    "Outcome": "producer.outcomes",
}


def __getattr__(name: str) -> object:
    # At first use: a worker imports `producer.contract` and must not load the clients with it.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
