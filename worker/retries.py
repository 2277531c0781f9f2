"""Which errors of a job are worth another try, and after how long: one table.

A retry goes on at the job's next token, on whichever worker takes it, so it costs a prefill. An error belongs here if
the same request may go well elsewhere or later; one that every try must meet again is the producer's or the operator's
to mend, and `producer requeue` is the way back. How often is the queue's setting `max_failures`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from engine.request import FailureKind
from worker.errors import JobRejected

PREPARATION_FAILED = "preparation_failed"
"""Making a request of the job raised what nobody expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """How long a job stays away: twice as long after each failure, up to a bound, and spread."""

    first_s: float
    most_s: float

    def delay_s(self, failures: int, share: float) -> float:
        """After so many failures before this one; `share` in [0, 1) says where in the upper half of the time."""
        whole_s = min(self.most_s, self.first_s * 2 ** min(failures, 30))
        return whole_s * (0.5 + share / 2)


RETRIES: Mapping[str, BackOff] = {
    # Other mates, another device: a step that failed on this job alone often goes well.
    FailureKind.STEP: BackOff(first_s=1, most_s=60),
    # Its mates must end first.
    FailureKind.MEMORY: BackOff(first_s=5, most_s=120),
    # A mount that comes back, or a worker that still has the file.
    FailureKind.FILE: BackOff(first_s=10, most_s=300),
    PREPARATION_FAILED: BackOff(first_s=1, most_s=60),
}

FINAL = frozenset(
    {
        # The job is wrong in itself.
        "invalid_request",
        "prompt_empty",
        "prompt_too_long",
        "unknown_token",
        "request_too_large",
        "model_mismatch",
        "result_too_large",
        # The same tokens give the same logits.
        FailureKind.LOGITS,
        # The operator said so, or must look first.
        "model_changed",
        "channel_damaged",
        "channel_lost",
        # Found by the scripts, and ended there.
        "payload_lost",
        "broken_key",
        "killed_its_worker",
        "cancelled",
        "deadline",
        "ttl",
    }
)
"""Every other code. A test compares both with what the code can say and with docs/operations.md."""


def retry_in_ms(code: str | None, failures: int, *, which: str) -> int | None:
    """How long a job that failed with `code` should stay away; None: a try more would not help.

    Args:
        code: The error's.
        failures: How often the job went back with a retryable error before.
        which: Names this try; two differ, so that jobs that failed together do not all come back together.
    """
    back_off = RETRIES.get(code or "")
    if back_off is None:
        return None
    return round(back_off.delay_s(failures, crc32(which.encode()) / 2**32) * 1000)


def rejection_of(error: BaseException) -> JobRejected:
    """What a job's producer hears of an error that nobody expected."""
    kind = FailureKind.of(error)
    code = PREPARATION_FAILED if kind is FailureKind.STEP else kind.value
    return JobRejected(code, f"its request could not be made: {type(error).__name__}: {error}")
