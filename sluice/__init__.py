"""Sluice: a message-queue worker service for asynchronous LLM generation.

    from sluice import Producer, AsyncProducer
    from sluice import LLM, SamplingParams

The packages are `sluice.producer` (the client), `sluice.worker` (the daemon, and `LLM` without a queue),
`sluice.gateway` (HTTP), `sluice.protocol` and `sluice.history` (what they share), `sluice.engine`, `sluice.kernels` and
`sluice.migrations`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.producer.aio import AsyncProducer
    from sluice.producer.client import Producer
    from sluice.worker.offline.llm import LLM
    from sluice.worker.offline.sampling import SamplingParams

__all__ = ["LLM", "AsyncProducer", "Producer", "SamplingParams"]

_MODULES = {
    "AsyncProducer": "sluice.producer",
    "LLM": "sluice.worker.offline.llm",
    "Producer": "sluice.producer",
    "SamplingParams": "sluice.worker.offline.sampling",
}


def __getattr__(name: str) -> object:
    # Loaded at first use: a worker process never loads the clients, and a client has no engine.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} needs the package {error.name!r}: install the worker: pip install 'sluice-llm[worker]'"
        ) from error
