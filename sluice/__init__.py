"""Sluice: a message-queue worker service for asynchronous LLM generation.

    from sluice import Producer, AsyncProducer

The packages are `sluice.producer` (the client), `sluice.worker` (the daemon), `sluice.engine`, `sluice.kernels` and
`sluice.migrations`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.producer.aio import AsyncProducer
    from sluice.producer.client import Producer

__all__ = ["AsyncProducer", "Producer"]


def __getattr__(name: str) -> object:
    # Loaded at first use: a worker process never loads the clients.
    if name in __all__:
        return getattr(import_module("sluice.producer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
