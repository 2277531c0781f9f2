"""Submit jobs: pack them into calls and read the answers. No I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeAlias, cast

from sluice.producer.errors import (
    AccessDenied,
    BatchClosed,
    IdempotencyConflict,
    InvalidJob,
    JobTooLarge,
    LessDurable,
    ProducerError,
    QueueFull,
    QueueRefused,
    QueueUnreachable,
)
from sluice.producer.operations.durability import DurabilityPolicy
from sluice.producer.operations.operation import Ask, Operation, Reply
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.surveys import survey_one
from sluice.protocol import calls, limits
from sluice.protocol.calls import Accepted, Call, Conflict, Duplicate, NewJob, Refused
from sluice.protocol.durability import NOTHING_ASKED, Durability, DurabilityCheck
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.jobs import CheckedJob, Prepared
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import command_of
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId


@dataclass(frozen=True, slots=True)
class Receipt:
    """Confirmation that the queue has the job, which will end in exactly one terminal state."""

    id: JobId
    is_duplicate: bool = False
    """Whether the job was submitted before, with the same id or idempotency key; `id` is that of the first submit."""

    ahead_jobs: int | None = None
    """Upper bound of the jobs ahead on its lane; None for a duplicate."""

    ahead_tokens: int | None = None
    state: JobState = JobState.QUEUED
    is_less_durable: bool = False
    """Whether the server has not confirmed the requested durability; True only in the receipt of a `LessDurable`."""

    def __str__(self) -> str:
        return self.id


SubmitAnswer: TypeAlias = Receipt | ProducerError
"""The result of submitting one of many jobs."""


def receipt_of(answer: SubmitAnswer) -> Receipt:
    """Return the receipt of a job that must be accepted.

    Raises:
        ProducerError: it was not.
    """
    if isinstance(answer, ProducerError):
        raise answer
    return answer


JOB_OVERHEAD_BYTES = 256
"""Bytes of the arguments of one job besides spec and payload."""

CALLS_PER_WAIT = 16
"""Calls in one round trip when a submit waits for disk or replicas; one wait covers all of them."""

SubmitCall: TypeAlias = tuple[Call[list[calls.SubmitReply]], list[int]]
"""A call, and the indices of its jobs in their round trip."""


class JobPacker:
    """A packer of jobs into round trips: of one call, or of several when the submit waits for disk or replicas."""

    def __init__(self, durability_check: DurabilityCheck = NOTHING_ASKED) -> None:
        self._max_calls = CALLS_PER_WAIT if durability_check.is_asked else 1
        self._jobs: list[Prepared] = []
        self._num_bytes = 0

    def add(self, prepared: Prepared) -> list[Prepared] | None:
        """Add a job, or the error that replaces it; return the preceding jobs if they fill a round trip."""
        job, _ = prepared
        num_bytes = _size(job) if isinstance(job, NewJob) else 0
        full = None
        if isinstance(job, NewJob) and not self._has_room(num_bytes):
            full = self.rest()
        self._jobs.append(prepared)
        self._num_bytes += num_bytes
        return full

    def rest(self) -> list[Prepared] | None:
        """Return the jobs since the last full round trip; None if there are none."""
        rest, self._jobs, self._num_bytes = self._jobs, [], 0
        return rest or None

    def _has_room(self, num_bytes: int) -> bool:
        """Return whether a job of this size fits. A job larger than the limit is sent alone."""
        if not self._jobs:
            return True
        has_bytes = self._num_bytes + num_bytes <= self._max_calls * limits.MAX_CALL_BYTES
        return has_bytes and len(self._jobs) < self._max_calls * limits.MAX_JOBS_PER_CALL


def _size(job: NewJob) -> int:
    return len(job.payload) + len(job.spec) + JOB_OVERHEAD_BYTES


def submit_jobs(
    queue: Queue, jobs: Sequence[Prepared], durability_check: DurabilityCheck = NOTHING_ASKED
) -> Operation[list[SubmitAnswer]]:
    """Submit the jobs of one round trip of `JobPacker`; return the result of each, in order.

    Raises:
        QueueRefused, AccessDenied: the server refuses the call itself.
    """
    indices: dict[int, list[int]] = {}
    for i, (job, _) in enumerate(jobs):
        if isinstance(job, NewJob):
            # Without a full check of the id: NewJob was built from a valid one.
            indices.setdefault(int(job.id.partition(".")[0]), []).append(i)
    cut = _calls_within_limits if durability_check.is_asked else _one_call
    split = [call for partition, of_one in indices.items() for call in cut(queue.keys(partition), jobs, of_one)]
    behind = durability_check.commands([queue.keys(partition) for partition in indices])
    commands = (*(command_of(call) for call, _ in split), *behind)
    replies = yield Ask(commands or (("PING",),), is_lenient=True)  # a Cluster cannot route an empty round trip
    answers_by_index: dict[int, SubmitAnswer] = {}
    for (call, of_one), reply in zip(split, replies, strict=False):
        answers_by_index.update(zip(of_one, _answers(call, [jobs[i] for i in of_one], reply), strict=True))
    doubt = durability_check.doubt(replies[len(split) :])
    answers = [job if isinstance(job, ProducerError) else answers_by_index[i] for i, (job, _) in enumerate(jobs)]
    return answers if doubt is None else [doubted(answer, durability_check.asked, doubt) for answer in answers]


def _one_call(keys: QueueKeys, jobs: Sequence[Prepared], indices: list[int]) -> Iterator[SubmitCall]:
    yield calls.submit(keys, [cast("NewJob", jobs[i][0]) for i in indices]), indices


def _calls_within_limits(keys: QueueKeys, jobs: Sequence[Prepared], indices: list[int]) -> Iterator[SubmitCall]:
    """Yield the calls for these jobs of one partition, each within the limits of a call."""
    current, num_bytes = list[int](), 0
    for i in indices:
        size = _size(cast("NewJob", jobs[i][0]))
        if current and (len(current) == limits.MAX_JOBS_PER_CALL or num_bytes + size > limits.MAX_CALL_BYTES):
            yield from _one_call(keys, jobs, current)
            current, num_bytes = [], 0
        current.append(i)
        num_bytes += size
    yield from _one_call(keys, jobs, current)


def _answers(call: Call[list[calls.SubmitReply]], jobs: Sequence[Prepared], reply: Reply) -> Iterator[SubmitAnswer]:
    if isinstance(reply, QueueFull):
        yield from [reply] * len(jobs)
    elif isinstance(reply, ProducerError):
        raise reply
    else:
        for (job, is_chosen), answer in zip(jobs, call.parse(reply), strict=True):
            yield _answer(cast("NewJob", job), answer, is_chosen=is_chosen)


def doubted(answer: SubmitAnswer, durability: Durability, doubt: str) -> SubmitAnswer:
    """Return the answer of a job whose durability the server has not confirmed."""
    if isinstance(answer, ProducerError):
        return answer
    return LessDurable(answer.id, str(durability), doubt, receipt=replace(answer, is_less_durable=True))


def prepare(
    queue: Queue, policy: DurabilityPolicy, job: CheckedJob, durability: str | None
) -> Operation[tuple[NewJob, DurabilityCheck]]:
    """Build a job on a partition that the workers serve; return it with the check that confirms its durability.

    Raises:
        InvalidJob: the id names a partition that the queue does not have.
        InvalidSetting, DurabilityRefused: as `DurabilityPolicy.resolve`.
    """
    if not queue.is_known:
        yield from queue.read()
    partitions = queue.partitions
    new_job = job.new_job(partitions)
    durability_check = yield from policy.resolve(queue, durability, queue.keys_of(new_job.id).partition)
    if queue.partitions != partitions:  # the workers have changed it
        new_job = job.new_job(queue.partitions)
    return new_job, durability_check


def submit(
    queue: Queue, job: NewJob, durability_check: DurabilityCheck = NOTHING_ASKED, *, is_chosen: bool
) -> Operation[Receipt]:
    """Submit one job.

    Raises:
        QueueFull, QueueRefused, JobTooLarge, InvalidJob, IdempotencyConflict: the queue does not accept it.
        LessDurable: the job is accepted, but the server has not confirmed the requested durability.
        QueueUnreachable: the job may be accepted; the error has its id.
    """
    try:
        [answer] = yield from submit_jobs(queue, [(job, is_chosen)], durability_check)
    except QueueUnreachable as error:
        error.job_id = job.id
        raise
    if isinstance(answer, QueueFull):
        raise answer.with_estimate((yield from retry_after_s(queue, job.id, answer)))
    if isinstance(answer, ProducerError):
        raise answer
    return answer


UNKNOWN_WAIT_S = 5.0
"""Time until the next attempt if no worker reports its rate, in seconds."""


RATE_KEPT_S = 1.0
"""How long the rate of a partition's workers is cached, because each of many refusals in a row needs it."""


def retry_after_s(queue: Queue, job_id: JobId, full: QueueFull) -> Operation[float]:
    """Estimate the time until the queue has room for a job, in seconds: the time for 1 % of the waiting tokens.

    It is that of the workers, or what the limit of the job's tenant allows if its own jobs fill its share.
    """
    keys = queue.keys_of(job_id)
    rates = [(yield from _rate_of_workers(queue, keys))]
    if full.reason == "tenant_full":
        rates.append((yield from _rate_of_tenant(keys, split_job_id(job_id)[1])))
    rate = min((rate for rate in rates if rate), default=None)
    return min(60.0, max(0.2, full.waiting_tokens / 100 / rate)) if rate else UNKNOWN_WAIT_S


def _rate_of_tenant(keys: QueueKeys, tenant: str) -> Operation[float | None]:
    """Return the tokens a second that a tenant's limit allows; None without one, or if this user may not read it."""
    [stated] = yield Ask((("HGET", keys.limits, f"tokens_per_minute:{tenant}"),), is_lenient=True)
    return int(stated) / 60 if isinstance(stated, bytes) and stated.isdigit() else None


def _rate_of_workers(queue: Queue, keys: QueueKeys) -> Operation[float | None]:
    read_s, rate = queue.rates.get(keys, (float("-inf"), None))
    if monotonic() - read_s > RATE_KEPT_S:
        rate = yield from _rate_of(keys)
        queue.rates[keys] = monotonic(), rate
    return rate


def _rate_of(keys: QueueKeys) -> Operation[float | None]:
    try:
        return (yield from survey_one(keys, fields=("tokens_per_s",))).tokens_per_s
    except AccessDenied:  # a user who may only submit cannot read the workers' rates
        return None


def _answer(job: NewJob, answer: calls.SubmitReply, *, is_chosen: bool) -> SubmitAnswer:
    match answer:
        case Accepted(job_id, ahead_jobs, ahead_tokens):
            return Receipt(job_id, ahead_jobs=ahead_jobs, ahead_tokens=ahead_tokens)
        case Duplicate(job_id, state) if job_id == job.id and not is_chosen:
            return Receipt(job_id, state=state)
        case Duplicate(job_id, state):
            return Receipt(job_id, is_duplicate=True, state=state)
        case Conflict(job_id):
            return IdempotencyConflict(job_id)
        case Refused():
            return _refusal(job, answer)


def _refusal(job: NewJob, refused: Refused) -> ProducerError:
    waiting = (refused.waiting_jobs, refused.waiting_tokens, refused.waiting_bytes)
    if refused.reason in calls.FULL:
        return QueueFull(refused.message, reason=refused.reason, waiting=waiting, bound=refused.bound)
    match refused.reason:
        case "too_large":
            return JobTooLarge(refused.message)
        case "feature":
            return InvalidJob(refused.message)
        case "batch_closed":
            return BatchClosed(f"job {job.id}: {refused.message}")
        case "wrong_type":
            return QueueRefused(f"job {job.id}: {refused.message}, or this user may not use it")
        case _:
            return QueueRefused(f"job {job.id}: {refused.message}")
