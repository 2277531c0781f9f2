"""Submit jobs: pack them into calls and read the answers. No I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from sluice.producer.contract import calls, limits
from sluice.producer.contract.calls import Accepted, Call, Conflict, Duplicate, NewJob, Refused
from sluice.producer.contract.durability import NOTHING_ASKED, DurabilityCheck
from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.states import JobState
from sluice.producer.contract.transport.execution import command_of
from sluice.producer.contract.wire import JobId
from sluice.producer.errors import (
    AccessDenied,
    IdempotencyConflict,
    InvalidJob,
    JobTooLarge,
    LessDurable,
    ProducerError,
    QueueFull,
    QueueRefused,
)
from sluice.producer.operations.operation import Ask, Operation, Reply
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.scripts import ask_call


@dataclass(frozen=True, slots=True)
class Receipt:
    """Confirmation that the queue has the job, which will end in exactly one terminal state."""

    id: JobId
    is_duplicate: bool = False
    """Whether it was submitted before, by id or idempotency key; `id` is that of the first submit."""

    ahead_jobs: int | None = None
    """Jobs ahead on its lane, an upper bound. None for a duplicate."""

    ahead_tokens: int | None = None
    state: JobState = JobState.QUEUED

    def __str__(self) -> str:
        return self.id


SubmitAnswer: TypeAlias = Receipt | ProducerError
"""The result of submitting one of many jobs."""

JOB_OVERHEAD_BYTES = 256
"""Size of the arguments of one job besides spec and payload."""

CALLS_PER_WAIT = 4
"""Calls in one chunk when a submit waits for disk or replicas: one wait covers all of them."""

Group: TypeAlias = tuple[Call[list[calls.SubmitReply]], list[int]]
"""A call, and the indices of its jobs in the chunk."""


@dataclass(slots=True, eq=False)
class Chunk:
    """Jobs sent together: as many as fit one call, or several calls when the submit waits for disk or replicas."""

    queue: Queue
    durability_check: DurabilityCheck = NOTHING_ASKED
    """What the server must confirm after the jobs."""

    jobs: list[NewJob | ProducerError] = field(default_factory=list[NewJob | ProducerError])
    """In the order of the caller; an error replaces a job that could not be encoded."""

    chosen: set[int] = field(default_factory=set[int])
    """Indices of jobs whose id the caller chose. A duplicate of any other id is a retry of this client."""

    num_bytes: int = 0
    _max_calls: int = field(init=False)
    _calls: list[Group] = field(default_factory=list[Group])

    def __post_init__(self) -> None:
        self._max_calls = CALLS_PER_WAIT if self.durability_check.is_asked else 1

    def takes(self, job: NewJob) -> bool:
        """Return whether this job still fits. A job larger than the limit is sent alone."""
        if not self.jobs:
            return True
        has_bytes = self.num_bytes + _size(job) <= self._max_calls * limits.MAX_CALL_BYTES
        return has_bytes and len(self.jobs) < self._max_calls * limits.MAX_JOBS_PER_CALL

    def add(self, job: NewJob | ProducerError, *, is_chosen: bool = False) -> None:
        """Add a job, or the error that replaces it."""
        if is_chosen:
            self.chosen.add(len(self.jobs))
        self.jobs.append(job)
        if isinstance(job, NewJob):
            self.num_bytes += _size(job)

    def ask(self) -> Ask:
        """Build the calls for each partition that has jobs. Add no job after this."""
        groups: dict[int, list[int]] = {}
        for i, job in enumerate(self.jobs):
            if isinstance(job, NewJob):
                # No full check of the id: NewJob was built from a valid one.
                groups.setdefault(int(job.id.partition(".")[0]), []).append(i)
        self._calls = [group for partition, places in groups.items() for group in self._cut(partition, places)]
        behind = self.durability_check.commands([self.queue.keys(partition) for partition in groups])
        return Ask((*(command_of(call) for call, _ in self._calls), *behind), is_lenient=True)

    def answers(self, replies: Sequence[Reply]) -> list[SubmitAnswer]:
        """Return the result of each job, in the order of the caller.

        Raises:
            QueueRefused, AccessDenied: the server refuses the call itself.
        """
        found: dict[int, SubmitAnswer] = {}
        for (call, places), reply in zip(self._calls, replies, strict=False):
            found.update(zip(places, self._read(call, places, reply), strict=True))
        doubt = self.durability_check.doubt(replies[len(self._calls) :])
        answers = [job if isinstance(job, ProducerError) else found[i] for i, job in enumerate(self.jobs)]
        return answers if doubt is None else [self._doubted(answer, doubt) for answer in answers]

    def _read(self, call: Call[list[calls.SubmitReply]], places: list[int], reply: Reply) -> Iterator[SubmitAnswer]:
        if isinstance(reply, QueueFull):
            yield from [reply] * len(places)
        elif isinstance(reply, ProducerError):
            raise reply
        else:
            for place, answer in zip(places, call.parse(reply), strict=True):
                yield _answer(cast("NewJob", self.jobs[place]), answer, is_chosen=place in self.chosen)

    def _doubted(self, answer: SubmitAnswer, doubt: str) -> SubmitAnswer:
        if isinstance(answer, ProducerError):
            return answer
        return LessDurable(answer.id, str(self.durability_check.asked), doubt, receipt=answer)

    def _cut(self, partition: int, places: list[int]) -> Iterator[Group]:
        """Yield the calls for these jobs of one partition: one, or several when the chunk may hold several calls."""
        keys, current, num_bytes = self.queue.keys(partition), list[int](), 0
        if self._max_calls == 1:
            yield self._group(keys, places)
            return
        for place in places:
            size = _size(cast("NewJob", self.jobs[place]))
            if current and (len(current) == limits.MAX_JOBS_PER_CALL or num_bytes + size > limits.MAX_CALL_BYTES):
                yield self._group(keys, current)
                current, num_bytes = [], 0
            current.append(place)
            num_bytes += size
        yield self._group(keys, current)

    def _group(self, keys: QueueKeys, places: list[int]) -> Group:
        return calls.submit(keys, [cast("NewJob", self.jobs[i]) for i in places]), places


def _size(job: NewJob) -> int:
    return len(job.payload) + len(job.spec) + JOB_OVERHEAD_BYTES


class Packer:
    """A packer of jobs into chunks. Holds the chunk that is being filled."""

    def __init__(self, queue: Queue, durability_check: DurabilityCheck = NOTHING_ASKED) -> None:
        self._queue = queue
        self._durability_check = durability_check
        self._chunk = Chunk(queue, durability_check)

    def add(self, job: NewJob | ProducerError, *, is_chosen: bool = False) -> Chunk | None:
        """Add a job; returns the previous chunk if that is full."""
        full = None
        if isinstance(job, NewJob) and not self._chunk.takes(job):
            full, self._chunk = self._chunk, Chunk(self._queue, self._durability_check)
        self._chunk.add(job, is_chosen=is_chosen)
        return full

    def rest(self) -> Chunk | None:
        """Return the last chunk, or None if it is empty."""
        rest, self._chunk = self._chunk, Chunk(self._queue, self._durability_check)
        return rest if rest.jobs else None


def submit(
    queue: Queue, job: NewJob, durability_check: DurabilityCheck = NOTHING_ASKED, *, is_chosen: bool
) -> Operation[Receipt]:
    """Submit one job.

    Raises:
        QueueFull, QueueRefused, JobTooLarge, InvalidJob, IdempotencyConflict: the queue does not accept it.
        LessDurable: it is accepted, but the server has not confirmed the requested durability.
    """
    chunk = Chunk(queue, durability_check)
    chunk.add(job, is_chosen=is_chosen)
    [answer] = chunk.answers((yield chunk.ask()))
    if isinstance(answer, QueueFull):
        raise answer.with_estimate((yield from retry_after_s(queue.keys_of(job.id), answer)))
    if isinstance(answer, ProducerError):
        raise answer
    return answer


UNKNOWN_WAIT_S = 5.0
"""When to try again if no worker reports its rate."""


def retry_after_s(keys: QueueKeys, full: QueueFull) -> Operation[float]:
    """Estimate when the queue has room again: the time its workers need for a hundredth of the waiting tokens."""
    try:
        view = yield from ask_call(calls.inspect(keys))
    except AccessDenied:  # a user that may only submit cannot read the workers' rates
        return UNKNOWN_WAIT_S
    if not view.tokens_per_s:
        return UNKNOWN_WAIT_S
    return min(60.0, max(0.2, full.waiting_tokens / 100 / view.tokens_per_s))


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
    match refused.reason:
        case "full_jobs" | "full_tokens" | "full_bytes" | "full_memory" | "outbox_full":
            return QueueFull(refused.message, reason=refused.reason, waiting=waiting, bound=refused.bound)
        case "too_large":
            return JobTooLarge(refused.message)
        case "feature":
            return InvalidJob(refused.message)
        case "wrong_type":
            return QueueRefused(f"job {job.id}: {refused.message}, or this user may not use it")
        case _:
            return QueueRefused(f"job {job.id}: {refused.message}")
