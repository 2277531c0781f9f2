"""The client side of Sluice: submit jobs, follow their tokens, wait for results. Needs no torch.

    from sluice.producer import Producer, AsyncProducer, QueueFull

Clients, their arguments and results, every error and `verify_webhook` are importable from here. Each is
loaded at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.producer.aio import AsyncProducer
    from sluice.producer.arguments import after
    from sluice.producer.client import Producer
    from sluice.producer.errors import (
        AccessDenied,
        BadOffset,
        BatchClosed,
        BatchNotFound,
        CertificateRefused,
        ChainNotFound,
        ChannelExpired,
        DurabilityRefused,
        EmbeddedServerError,
        HistoryUnavailable,
        IdempotencyConflict,
        InvalidJob,
        InvalidSchedule,
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
        ScheduleNotFound,
        TooManySchedules,
    )
    from sluice.producer.operations.batches import BatchCancelled
    from sluice.producer.operations.chains import ChainView
    from sluice.producer.operations.dead import DeadFilter
    from sluice.producer.operations.follow import Cursor, StreamEvent
    from sluice.producer.operations.results import Outcome
    from sluice.producer.operations.schedules import ScheduleView
    from sluice.producer.operations.submission import Receipt
    from sluice.producer.operations.views import JobStatus
    from sluice.protocol.calls import BatchView, JobView, QueueSettings, QueueView
    from sluice.protocol.jobs import Job, Options, job
    from sluice.protocol.messages import (
        ChoiceResult,
        End,
        JobId,
        JobResult,
        Message,
        PromptResult,
        TokenLogprobs,
        Usage,
    )
    from sluice.protocol.outputs.parser import FunctionCall, ParsedOutput
    from sluice.protocol.states import JobState
    from sluice.protocol.waits import WaitCause, WaitNotice
    from sluice.protocol.webhooks import BadSignature, verify_webhook

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
    "ChainNotFound",
    "ChainView",
    "ChannelExpired",
    "ChoiceResult",
    "Cursor",
    "DeadFilter",
    "DurabilityRefused",
    "EmbeddedServerError",
    "End",
    "FunctionCall",
    "HistoryUnavailable",
    "IdempotencyConflict",
    "InvalidJob",
    "InvalidSchedule",
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
    "ParsedOutput",
    "Producer",
    "ProducerError",
    "PromptResult",
    "QueueFull",
    "QueueRefused",
    "QueueSettings",
    "QueueUnreachable",
    "QueueView",
    "Receipt",
    "ResultExpired",
    "ResultTimeout",
    "ScheduleNotFound",
    "ScheduleView",
    "StreamEvent",
    "TokenLogprobs",
    "TooManySchedules",
    "Usage",
    "WaitCause",
    "WaitNotice",
    "after",
    "job",
    "verify_webhook",
]

_HOMES = {
    "AsyncProducer": "producer.aio",
    "Producer": "producer.client",
    "BatchView": "protocol.calls",
    "JobView": "protocol.calls",
    "QueueSettings": "protocol.calls",
    "QueueView": "protocol.calls",
    "ChoiceResult": "protocol.messages",
    "End": "protocol.messages",
    "JobId": "protocol.messages",
    "JobResult": "protocol.messages",
    "Message": "protocol.messages",
    "PromptResult": "protocol.messages",
    "TokenLogprobs": "protocol.messages",
    "Usage": "protocol.messages",
    "FunctionCall": "protocol.outputs.parser",
    "ParsedOutput": "protocol.outputs.parser",
    "JobState": "protocol.states",
    "Job": "protocol.jobs",
    "Options": "protocol.jobs",
    "job": "protocol.jobs",
    "after": "producer.arguments",
    "BatchCancelled": "producer.operations.batches",
    "ChainView": "producer.operations.chains",
    "DeadFilter": "producer.operations.dead",
    "Cursor": "producer.operations.follow",
    "StreamEvent": "producer.operations.follow",
    "Outcome": "producer.operations.results",
    "Receipt": "producer.operations.submission",
    "ScheduleView": "producer.operations.schedules",
    "JobStatus": "producer.operations.views",
    "WaitCause": "protocol.waits",
    "WaitNotice": "protocol.waits",
    "BadSignature": "protocol.webhooks",
    "verify_webhook": "protocol.webhooks",
}
"""The module of each name that is not an error."""


def __getattr__(name: str) -> object:
    # Loaded at first use: a worker imports `sluice.protocol` and must not load the clients with it.
    if name in __all__:
        return getattr(import_module(f"sluice.{_HOMES.get(name, 'producer.errors')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
