"""Which errors of a job are retryable, and after which delay: one table.

A retry resumes at the job's next token, on any worker, so it costs a prefill. An error is retryable if the same request
may succeed elsewhere or later. All other errors need the producer or the operator, who requeues the job with `producer
requeue`. The queue's setting `max_failures` bounds the number of retries.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from sluice.engine.request import FailureKind
from sluice.worker.errors import JobRejected

PREPARATION_FAILED = "preparation_failed"
"""The code of an unexpected error while the request was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDelay:
    """A delay that doubles with each failure, up to a bound, with random spread."""

    first_s: float
    most_s: float

    def delay_s(self, failures: int, share: float) -> float:
        """Return the delay after `failures` earlier ones; `share` in [0, 1) is the position in the upper half of it."""
        whole_s = min(self.most_s, self.first_s * 2 ** min(failures, 30))
        return whole_s * (0.5 + share / 2)


RETRIES: Mapping[str, RetryDelay] = {
    # In another batch or on another device a step that failed for this job alone often succeeds.
    FailureKind.STEP: RetryDelay(first_s=1, most_s=60),
    # Other jobs of the batch must end first.
    FailureKind.MEMORY: RetryDelay(first_s=5, most_s=120),
    # The mount may return, or another worker has the file.
    FailureKind.FILE: RetryDelay(first_s=10, most_s=300),
    PREPARATION_FAILED: RetryDelay(first_s=1, most_s=60),
}


def retry_in_ms(code: str | None, failures: int, *, which: str) -> int | None:
    """Return how long to wait before a job that failed with `code` is retried; None if it is not retryable.

    Args:
        code: The error code.
        failures: Retryable failures of the job before this one.
        which: A name for this attempt. It spreads the delays of jobs that failed together.
    """
    delay = RETRIES.get(code or "")
    if delay is None:
        return None
    return round(delay.delay_s(failures, crc32(which.encode()) / 2**32) * 1000)


def rejection_of(error: BaseException) -> JobRejected:
    """Make the rejection for an unexpected error."""
    kind = FailureKind.of(error)
    code = PREPARATION_FAILED if kind is FailureKind.STEP else kind.value
    return JobRejected(code, f"its request could not be made: {type(error).__name__}: {error}")
