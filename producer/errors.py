"""Errors of the client.

ProducerError
├── InvalidJob                   caller: the job is wrong; a retry will not help
│   ├── InvalidPrompt            the prompt is wrong
│   ├── InvalidSchedule          the rule of a schedule is wrong
│   └── JobTooLarge              no worker of this queue can hold the job
├── InvalidSetting               caller: a URL, an environment variable or a file is wrong
├── BadOffset                    caller: the job never had the tokens of the given position
├── IdempotencyConflict          caller: the key or id belongs to another job
├── QueueFull                    temporary: the queue is at a limit; try again after `retry_after_s`
├── QueueRefused                 operator: the queue does not accept jobs in its present configuration
│   ├── BatchClosed              the batch of the job accepts no more jobs
│   ├── TooManySchedules         the queue has as many schedules as it may; remove one first
│   └── DurabilityRefused        the server cannot guarantee the requested durability; nothing was submitted
├── LessDurable                  the queue has the job, but the server did not confirm the durability; see `receipt`
├── JobNotFound                  the id is unknown, or its data has expired
├── BatchNotFound                no job of this batch is known
├── ChainNotFound                no job of this chain is blocked
├── ScheduleNotFound             the queue has no schedule of this name
├── JobNotDone                   the job ended without its whole output; `partial` has the output so far
│   ├── JobFailed
│   ├── JobCancelled
│   └── JobExpired               its deadline or its longest wait has passed
├── ResultExpired                the job is done, but its output has expired
├── ChannelExpired               the channel has lost output that the reader lacks, and no result fills the gap
├── ResultTimeout                the job has not ended in time
├── QueueUnreachable             temporary: the server does not answer; nothing is lost, try again
│   ├── AccessDenied             wrong password or missing rights
│   ├── CertificateRefused       TLS: one side does not accept the certificate of the other
│   └── NotAQueue                the server does not speak the Redis protocol
├── EmbeddedServerError          the embedded server cannot be found, started or stopped
└── HistoryUnavailable           the job history cannot be read
"""

from sluice.protocol.errors import EmbeddedServerError as EmbeddedServerError
from sluice.protocol.errors import HistoryUnavailable as HistoryUnavailable
from sluice.protocol.errors import InvalidJob as InvalidJob
from sluice.protocol.errors import InvalidPrompt as InvalidPrompt
from sluice.protocol.errors import InvalidSchedule as InvalidSchedule
from sluice.protocol.errors import InvalidSetting as InvalidSetting
from sluice.protocol.errors import ProducerError as ProducerError
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobResult


class JobTooLarge(InvalidJob):
    """Prompt and output together exceed the capacity of this queue's workers."""


class BadOffset(ProducerError, ValueError):
    """The job never reached the position to read from."""


class IdempotencyConflict(ProducerError):
    """The idempotency key, or the id, belongs to a job with another prompt or options."""

    def __init__(self, job_id: JobId) -> None:
        super().__init__(
            f"the idempotency key or id belongs to job {job_id}, whose request was different. Use another key, or "
            "read the result of that job."
        )
        self.job_id = job_id


class QueueFull(ProducerError):
    """The queue is at one of its limits. The job was not submitted."""

    def __init__(
        self, message: str, *, reason: str, waiting: tuple[int, int, int], bound: int, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message)
        self.reason = reason
        """The limit: `full_jobs`, `full_tokens`, `full_bytes`, `tenant_full` (its share of them), `full_memory` (the
        server's), `outbox_full` or `full_blocked` (jobs that wait for others).
        """

        self.waiting_jobs, self.waiting_tokens, self.waiting_bytes = waiting
        self.bound = bound
        self.retry_after_s = retry_after_s
        """Estimated time until the queue has room again, in seconds, from the rate that the workers report."""

    def with_estimate(self, retry_after_s: float) -> "QueueFull":
        """Return the same error with another estimate."""
        waiting = self.waiting_jobs, self.waiting_tokens, self.waiting_bytes
        return QueueFull(str(self), reason=self.reason, waiting=waiting, bound=self.bound, retry_after_s=retry_after_s)


class QueueRefused(ProducerError):
    """The queue does not accept this job in its present configuration."""


class BatchClosed(QueueRefused):
    """The batch of the job accepts no more jobs: it was closed or cancelled, or its deadline has passed."""


class TooManySchedules(QueueRefused):
    """The queue has as many schedules as it may. One must be removed first."""


class DurabilityRefused(QueueRefused):
    """The server cannot guarantee the requested durability. Nothing was submitted."""


class LessDurable(ProducerError):
    """The queue has the job, but the server has not confirmed the requested durability."""

    def __init__(self, job_id: JobId, asked: str, doubt: str, *, receipt: object) -> None:
        super().__init__(
            f"job {job_id} is accepted, but less durable than {asked}: {doubt} It will run unless the server loses "
            "it. To try again, submit the same job with this job_id: the queue accepts it once."
        )
        self.job_id = job_id
        self.receipt = receipt
        """The Receipt of the accepted job."""


class JobNotFound(ProducerError, LookupError):
    """The job is unknown, or its data has expired."""

    def __init__(self, job_id: JobId, *, advice: str | None = None) -> None:
        super().__init__(
            f"job {job_id} is unknown to this queue: the id or the queue is wrong, or its data has expired. "
            f"{advice or f'Look in the history: producer jobs show {job_id}'}"
        )
        self.job_id = job_id


class BatchNotFound(ProducerError, LookupError):
    """The batch has no jobs, or its data has expired."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"batch {name} has no jobs in this queue: its name or the queue is wrong, its data has expired, or all "
            "its jobs are blocked: list these with `producer chains`, cancel them with `producer cancel --chain ID`. "
            f"Look in the history: producer jobs list --batch {name}"
        )
        self.name = name


class ChainNotFound(ProducerError, LookupError):
    """No job of the chain is blocked: its id or the queue is wrong, or its jobs were released or cancelled."""

    def __init__(self, chain_id: str) -> None:
        super().__init__(f"the queue has no blocked jobs of chain {chain_id:.100}. List chains: producer chains")
        self.chain_id = chain_id


class ScheduleNotFound(ProducerError, LookupError):
    """The queue has no schedule of this name and tenant."""

    def __init__(self, name: str, tenant: str) -> None:
        super().__init__(
            f"tenant {tenant!r} has no schedule {name!r:.100} in this queue. List them: producer schedules list"
        )
        self.name = name
        self.tenant = tenant


class JobNotDone(ProducerError):
    """The job ended without its whole output."""

    state: JobState

    def __init__(
        self, job_id: JobId, reason: str, *, code: str | None = None, partial: JobResult | None = None
    ) -> None:
        super().__init__(f"job {job_id} {self.state}: {reason}")
        self.job_id = job_id
        self.reason = reason
        self.code = code
        """Error code, such as `prompt_too_long`."""

        self.partial = partial
        """The output so far, if known."""


class JobFailed(JobNotDone):
    """The job failed; the message states the reason."""

    state = JobState.FAILED


class JobCancelled(JobNotDone):
    """The job was cancelled."""

    state = JobState.CANCELLED


class JobExpired(JobNotDone):
    """The job's deadline passed, or it waited longer than its `ttl_s`."""

    state = JobState.EXPIRED


class ResultExpired(ProducerError):
    """The job is done, but its output has expired."""


class ChannelExpired(ProducerError):
    """The channel has lost output that the reader lacks, and it cannot be taken from a result."""


class ResultTimeout(ProducerError, TimeoutError):
    """The job did not end within the timeout; it continues."""


class QueueUnreachable(ProducerError):
    """The server does not answer."""

    job_id: JobId | None = None
    """The job of a single submit, which the server may have accepted. Cancel it, or submit it again with this id."""


class AccessDenied(QueueUnreachable):
    """The server refuses this user."""


class CertificateRefused(QueueUnreachable):
    """TLS failed: the server's certificate is not trusted, or the server does not accept the client's."""


class NotAQueue(QueueUnreachable):
    """The server does not speak the Redis protocol."""


ENDS_BADLY: dict[JobState, type[JobNotDone]] = {kind.state: kind for kind in (JobFailed, JobCancelled, JobExpired)}
"""The error for each final state except done."""
