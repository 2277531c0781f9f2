"""One function per script: typed arguments in, a `Call` with its reply parser out. No I/O.

`contract.transport.execution` runs a `Call` on a connection. The arguments of scripts are packed only here.
The calls of `worker audit` are in `audit`.
"""

from sluice.producer.contract.calls.base import Argument, Call, Reply
from sluice.producer.contract.calls.batches import (
    BatchView,
    cancel_batch,
    close_batch,
    expire_batch,
    inspect_batch,
    join_batch,
)
from sluice.producer.contract.calls.control import (
    KnownSettings,
    QueueSettings,
    cancel,
    configure,
    delete,
    fire_timers,
    pause,
    purge,
    requeue,
    restore_settings,
)
from sluice.producer.contract.calls.heartbeat import Beat, BeatReply, beat, report_death
from sluice.producer.contract.calls.leasing import LeasedJob, PullReply, PullRequest, Returned, give_back, pull
from sluice.producer.contract.calls.progress import (
    AdvanceAnswer,
    Already,
    Broken,
    EndCall,
    Ok,
    Progress,
    Replaced,
    Retried,
    SendFrom,
    advance,
    put_result,
)
from sluice.producer.contract.calls.submission import (
    Accepted,
    Conflict,
    Duplicate,
    NewJob,
    Refused,
    SourceLine,
    SubmitReply,
    submit,
)
from sluice.producer.contract.calls.views import Death, JobView, QueueView, inspect, status

__all__ = [
    "Accepted",
    "AdvanceAnswer",
    "Already",
    "Argument",
    "BatchView",
    "Beat",
    "BeatReply",
    "Broken",
    "Call",
    "Conflict",
    "Death",
    "Duplicate",
    "EndCall",
    "JobView",
    "KnownSettings",
    "LeasedJob",
    "NewJob",
    "Ok",
    "Progress",
    "PullReply",
    "PullRequest",
    "QueueSettings",
    "QueueView",
    "Refused",
    "Replaced",
    "Reply",
    "Retried",
    "Returned",
    "SendFrom",
    "SourceLine",
    "SubmitReply",
    "advance",
    "beat",
    "cancel",
    "cancel_batch",
    "close_batch",
    "configure",
    "delete",
    "expire_batch",
    "fire_timers",
    "give_back",
    "inspect",
    "inspect_batch",
    "join_batch",
    "pause",
    "pull",
    "purge",
    "put_result",
    "report_death",
    "requeue",
    "restore_settings",
    "status",
    "submit",
]
