"""What can go wrong on the producer's side.

ProducerError
├── InvalidJob                   the caller's: the job itself is wrong; sending it again will not help
│   └── JobTooLarge              no worker of this queue can ever hold it
├── InvalidSetting               the caller's: a URL, an environment variable or a file is wrong
├── BadOffset                    the caller's: the job never had the tokens the reader says it has
├── IdempotencyConflict          the caller's: the key or id belongs to another job
├── QueueFull                    nobody's: the queue is at a bound; try again after `retry_after_s`
├── QueueRefused                 the operator's: the queue does not take jobs as it is now
│   └── DurabilityRefused        the server cannot promise the durability asked for; nothing was submitted
├── LessDurable                  the queue has the job, but the server did not confirm the durability; `receipt` has it
├── JobNotFound                  the id is unknown, or its data has expired
├── BatchNotFound                no job of a batch of that name is known
├── JobNotDone                   the job ended without all of its output; `partial` has what there is
│   ├── JobFailed
│   ├── JobCancelled
│   └── JobExpired               its deadline or its time in the queue ran out
├── ResultExpired                the job is done, but its output is no longer kept
├── ChannelExpired               tokens can be cut from the result, text only with a full cursor
├── ResultTimeout                the job is still on its way
├── QueueUnreachable             the server is away: nothing is lost, try again
│   ├── AccessDenied             wrong password or missing rights
│   ├── CertificateRefused       TLS: one side does not accept the other's certificate
│   └── NotAQueue                something answers there, but not as Redis does
├── EmbeddedServerError          the embedded server cannot be found or started
└── HistoryUnavailable           the job history cannot be read
"""

from producer.contract import errors as contract_errors
from producer.contract.states import JobState
from producer.contract.wire import JobId, JobResult


class ProducerError(Exception):
    """Anything the producer's side raises on purpose. The message is a sentence and says what to do."""


class InvalidJob(ProducerError, contract_errors.InvalidJob):
    """The job itself is wrong; the message names the value."""


class JobTooLarge(InvalidJob):
    """Prompt and output together exceed what the workers of this queue can hold."""


class InvalidSetting(ProducerError, ValueError):
    """A setting is wrong; the message names it."""


class BadOffset(ProducerError, ValueError):
    """A reader asks for tokens after a place that the job never reached."""


class IdempotencyConflict(ProducerError):
    """The idempotency key, or the id, belongs to a job that asked for something else."""

    def __init__(self, job_id: JobId) -> None:
        super().__init__(
            f"the idempotency key or id belongs to job {job_id}, which asked for something else. Use another key, or "
            "ask for that job's result."
        )
        self.job_id = job_id


class QueueFull(ProducerError):
    """The queue is at one of its bounds. Nothing of the job was written."""

    def __init__(self, message: str, *, reason: str, waiting: tuple[int, int, int], bound: int) -> None:
        super().__init__(message)
        self.reason = reason
        """Which bound: `full_jobs`, `full_tokens`, `full_bytes`, `full_memory` (the server's) or `outbox_full`."""

        self.waiting_jobs, self.waiting_tokens, self.waiting_bytes = waiting
        self.bound = bound
        self.retry_after_s = 1.0
        """A guess at when there is room again, from the pace that the workers report."""


class QueueRefused(ProducerError):
    """The queue does not take this job as it is configured now."""


class DurabilityRefused(QueueRefused):
    """The server cannot promise the durability that was asked for. Nothing was submitted."""


class LessDurable(ProducerError):
    """The queue has the job and will do it, but the server has not confirmed that it is as durable as asked."""

    def __init__(self, job_id: JobId, asked: str, doubt: str, *, receipt: object) -> None:
        super().__init__(
            f"job {job_id} is accepted, but less durable than {asked}: {doubt} It will be done unless the server loses "
            "it. To ask once more, submit the same with this job_id: the queue takes it once."
        )
        self.job_id = job_id
        self.receipt = receipt
        """The Receipt of the accepted job."""


class JobNotFound(ProducerError, LookupError):
    """No such job, or its data has expired."""

    def __init__(self, job_id: JobId) -> None:
        super().__init__(
            f"job {job_id} is unknown to this queue: the id or the queue is wrong, or its data has expired. "
            f"Look in the history: producer jobs show {job_id}"
        )
        self.job_id = job_id


class BatchNotFound(ProducerError, LookupError):
    """No job of such a batch, or its data has expired."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"batch {name} has no jobs in this queue: its name or the queue is wrong, or its data has expired. "
            f"Look in the history: producer jobs list --batch {name}"
        )
        self.name = name


class JobNotDone(ProducerError):
    """The job ended without all of its output."""

    state: JobState

    def __init__(
        self, job_id: JobId, reason: str, *, code: str | None = None, partial: JobResult | None = None
    ) -> None:
        super().__init__(f"job {job_id} {self.state}: {reason}")
        self.job_id = job_id
        self.reason = reason
        self.code = code
        """A constant word for programs, such as `prompt_too_long`."""

        self.partial = partial
        """What had been generated, where it is known."""


class JobFailed(JobNotDone):
    """The job could not be done; the message says why."""

    state = JobState.FAILED


class JobCancelled(JobNotDone):
    """Somebody cancelled the job."""

    state = JobState.CANCELLED


class JobExpired(JobNotDone):
    """The job's deadline passed, or it waited longer than it was allowed to."""

    state = JobState.EXPIRED


class ResultExpired(ProducerError):
    """The job is done, but its output is no longer kept."""


class ChannelExpired(ProducerError):
    """The channel is gone, and a token offset alone does not say where the rest of the text begins."""


class ResultTimeout(ProducerError, TimeoutError):
    """The job did not end within the time given; it goes on."""


class QueueUnreachable(ProducerError):
    """The server does not answer."""


class AccessDenied(QueueUnreachable):
    """The server refuses this user."""


class CertificateRefused(QueueUnreachable):
    """TLS: the server's certificate is not trusted here, or the server does not accept ours, or there is none."""


class NotAQueue(QueueUnreachable):
    """Something answers, but not in a way a queue's server does."""


class EmbeddedServerError(ProducerError):
    """The embedded server cannot be found, started or stopped."""


class HistoryUnavailable(ProducerError):
    """The job history cannot be read."""


ENDS_BADLY: dict[JobState, type[JobNotDone]] = {kind.state: kind for kind in (JobFailed, JobCancelled, JobExpired)}
"""The error that stands for each end other than done."""
