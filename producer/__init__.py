"""The client side of Sluice: submit jobs, follow their tokens, wait for results. Needs no torch.

    from sluice.producer import Producer, AsyncProducer, QueueFull

Clients, their arguments and results, every error and `verify_webhook` are importable from here. Each is
loaded at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.producer.aio import AsyncProducer
    from sluice.producer.client import Producer
    from sluice.producer.contract.calls import BatchView, JobView, QueueSettings, QueueView
    from sluice.producer.contract.jobs import Job, Options, job
    from sluice.producer.contract.messages import ChoiceResult, End, JobId, JobResult, Message, TokenLogprobs, Usage
    from sluice.producer.contract.states import JobState
    from sluice.producer.contract.waits import WaitCause, WaitNotice
    from sluice.producer.contract.webhooks import BadSignature, verify_webhook
    from sluice.producer.errors import (
        AccessDenied,
        BadOffset,
        BatchClosed,
        BatchNotFound,
        CertificateRefused,
        ChannelExpired,
        DurabilityRefused,
        EmbeddedServerError,
        HistoryUnavailable,
        IdempotencyConflict,
        InvalidJob,
        InvalidSetting,
        JobCancelled,
        JobExpired,
        JobFailed,
        JobNotDone,
        JobNotFound,
        JobTooLarge,
        LessDurable,
        NotAQueue,
        ProducerError,
        QueueFull,
        QueueRefused,
        QueueUnreachable,
        ResultExpired,
        ResultTimeout,
    )
    from sluice.producer.operations.batches import BatchCancelled
    from sluice.producer.operations.dead import DeadFilter
    from sluice.producer.operations.follow import Cursor, StreamEvent
    from sluice.producer.operations.results import Outcome
    from sluice.producer.operations.submission import Receipt
    from sluice.producer.operations.views import JobStatus

__all__ = [
    "AccessDenied",
    "AsyncProducer",
    "BadOffset",
    "BadSignature",
    "BatchCancelled",
    "BatchClosed",
    "BatchNotFound",
    "BatchView",
    "CertificateRefused",
    "ChannelExpired",
    "ChoiceResult",
    "Cursor",
    "DeadFilter",
    "DurabilityRefused",
    "EmbeddedServerError",
    "End",
    "HistoryUnavailable",
    "IdempotencyConflict",
    "InvalidJob",
    "InvalidSetting",
    "Job",
    "JobCancelled",
    "JobExpired",
    "JobFailed",
    "JobId",
    "JobNotDone",
    "JobNotFound",
    "JobResult",
    "JobState",
    "JobStatus",
    "JobTooLarge",
    "JobView",
    "LessDurable",
    "Message",
    "NotAQueue",
    "Options",
    "Outcome",
    "Producer",
    "ProducerError",
    "QueueFull",
    "QueueRefused",
    "QueueSettings",
    "QueueUnreachable",
    "QueueView",
    "Receipt",
    "ResultExpired",
    "ResultTimeout",
    "StreamEvent",
    "TokenLogprobs",
    "Usage",
    "WaitCause",
    "WaitNotice",
    "job",
    "verify_webhook",
]

_HOMES = {
    "AsyncProducer": "aio",
    "Producer": "client",
    "BatchView": "contract.calls",
    "JobView": "contract.calls",
    "QueueSettings": "contract.calls",
    "QueueView": "contract.calls",
    "ChoiceResult": "contract.messages",
    "End": "contract.messages",
    "JobId": "contract.messages",
    "JobResult": "contract.messages",
    "Message": "contract.messages",
    "TokenLogprobs": "contract.messages",
    "Usage": "contract.messages",
    "JobState": "contract.states",
    "Job": "contract.jobs",
    "Options": "contract.jobs",
    "job": "contract.jobs",
    "BatchCancelled": "operations.batches",
    "DeadFilter": "operations.dead",
    "Cursor": "operations.follow",
    "StreamEvent": "operations.follow",
    "Outcome": "operations.results",
    "Receipt": "operations.submission",
    "JobStatus": "operations.views",
    "WaitCause": "contract.waits",
    "WaitNotice": "contract.waits",
    "BadSignature": "contract.webhooks",
    "verify_webhook": "contract.webhooks",
}
"""The module of each name that is not an error."""


def __getattr__(name: str) -> object:
    # Loaded at first use: a worker imports `sluice.producer.contract` and must not load the clients with it.
    if name in __all__:
        return getattr(import_module(f"sluice.producer.{_HOMES.get(name, 'errors')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
