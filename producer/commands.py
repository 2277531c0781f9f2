"""The producer's side without I/O: what to send for what is asked, and what the replies mean.

Every operation is a generator. It yields an `Ask` (one pipelined round trip) or a `Pause`, is sent the replies (or
what the link raises is thrown into it), and returns or yields what the caller wants. `client.py` and `aio.py` only run
it: one waits, the other awaits.

An Ask may be sent again after a lost connection, with the same content: reading changes nothing, a submit carries its
ids, a cancel of a cancelled job says so. The few that may not be say `is_repeatable=False`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeAlias, TypeVar, cast

from producer.contract import calls, limits
from producer.contract.calls import Accepted, BatchView, Call, Conflict, Duplicate, JobView, NewJob, QueueView, Refused
from producer.contract.durability import NOTHING_ASKED, Assurance
from producer.contract.keys import QueueKeys
from producer.contract.scripts import load
from producer.contract.states import JobState
from producer.contract.wire import JobId, JobResult, WireError, decode_result, split_job_id
from producer.errors import (
    ENDS_BADLY,
    AccessDenied,
    BatchNotFound,
    IdempotencyConflict,
    InvalidJob,
    JobFailed,
    JobNotFound,
    JobTooLarge,
    LessDurable,
    ProducerError,
    QueueFull,
    QueueRefused,
    ResultExpired,
    ResultTimeout,
)

Result = TypeVar("Result")
Reply: TypeAlias = object
Command: TypeAlias = tuple[str | bytes | int | float, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Commands for one pipelined round trip; the answer is one reply for each."""

    commands: tuple[Command, ...]
    is_repeatable: bool = True
    """Whether it may be sent again when the connection was lost before the reply."""

    is_lenient: bool = False
    """An error of one command is that command's reply, as our typed error, and not raised."""


@dataclass(frozen=True, slots=True)
class Read:
    """Read channels after entry ids, waiting for the first entry; the answer is one list of (channel, entries)."""

    cursors: Mapping[str, str]
    block_ms: int

    @property
    def ask(self) -> Ask:
        """The same as a command; `channel_entries` reads its reply."""
        return Ask((xread(self.cursors, block_ms=self.block_ms),))


@dataclass(frozen=True, slots=True)
class Pause:
    """Let this much time pass."""

    seconds: float


Step: TypeAlias = Ask | Read | Pause
"""What an operation wants done."""

STEPS = (Ask, Read, Pause)

Operation: TypeAlias = Generator[Step, list[Reply], Result]
"""Runs to a result."""

Entries: TypeAlias = list[tuple[str, bytes]]
"""Entry id and encoded ChannelEntry, in order."""

WAIT_BLOCK_MS = 2000
"""Longest blocking read; then the state is looked at, since an owner may have died or a channel expired."""

MAX_LOOK_S = 30.0
"""While a channel stays silent, its job's state is looked at ever more rarely, at last after so long."""

WAIT_SHARE = 0.05
MAX_WAIT_S = 0.1
"""A waiting `result` looks again after this share of the time it has waited, at most this long."""


# ---------------------------------------------------------------- a queue's names


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue's name and number of partitions.

    Raises:
        InvalidJob: the name cannot be part of a key.
    """

    name: str
    partitions: int = 1

    def __post_init__(self) -> None:
        is_fine = 0 < len(self.name) <= limits.MAX_QUEUE_NAME_CHARS and not set(self.name) & set("{}: \n\r\t")
        if not is_fine or self.partitions < 1:
            raise InvalidJob(
                f"a queue's name is 1 to {limits.MAX_QUEUE_NAME_CHARS} characters without braces, colons and spaces, "
                f"and it has 1 partition or more; got {self.name!r} and {self.partitions}"
            )

    def keys(self, partition: int) -> QueueKeys:
        """Keys of one partition."""
        return QueueKeys(self.name, partition)

    def keys_of(self, job_id: str) -> QueueKeys:
        """Keys of the partition that holds this job.

        Raises:
            InvalidJob: not a job id.
        """
        return QueueKeys(self.name, partition_in(job_id))

    def all_keys(self) -> list[QueueKeys]:
        """Keys of every partition."""
        return [self.keys(partition) for partition in range(self.partitions)]


def partition_in(job_id: str) -> int:
    """The partition that an id names.

    Raises:
        InvalidJob: not a job id.
    """
    try:
        return split_job_id(job_id)[0]
    except (WireError, TypeError) as error:
        raise InvalidJob(str(error)) from error


# ---------------------------------------------------------------- running calls

_sources: dict[str, str] = {}


def command_of(call: Call[Any]) -> Command:  # Any: the reply does not matter here
    """The call as a command; the server is expected to know the script."""
    script = load(call.script)
    _sources[script.sha1] = script.source
    return ("EVALSHA", script.sha1, len(call.keys), *call.keys, *call.args)


def with_source(command: Command) -> Command:
    """The same for a server that does not know the script."""
    if command[0] != "EVALSHA":
        return command
    return ("EVAL", _sources[str(command[1])], *command[2:])


def ask_call(call: Call[Result], *, is_repeatable: bool = True) -> Operation[Result]:
    """Make one call."""
    [reply] = yield Ask((command_of(call),), is_repeatable)
    return call.parse(reply)


def ask_calls(made: Sequence[Call[Result]], *, is_repeatable: bool = True) -> Operation[list[Result]]:
    """Make several calls in one round trip."""
    if not made:
        return []
    replies = yield Ask(tuple(map(command_of, made)), is_repeatable)
    return [call.parse(reply) for call, reply in zip(made, replies, strict=True)]


def for_jobs(
    queue: Queue,
    job_ids: Sequence[JobId],
    make: Callable[[QueueKeys, Sequence[JobId]], Call[list[Result]]],
    *,
    bite: int = limits.MAX_BITE,
    is_repeatable: bool = True,
) -> Operation[list[Result]]:
    """Make a call that takes jobs of one partition, in bites, for any jobs; answers in the order of the jobs."""
    bites = _bites(job_ids, bite)
    made = [make(queue.keys(partition), [job_ids[i] for i in places]) for partition, places in bites]
    answers: dict[int, Result] = {}
    for (_, places), found in zip(bites, (yield from ask_calls(made, is_repeatable=is_repeatable)), strict=True):
        answers.update(zip(places, found, strict=True))
    return [answers[i] for i in range(len(job_ids))]


def _bites(job_ids: Sequence[JobId], bite: int) -> list[tuple[int, list[int]]]:
    places: dict[int, list[int]] = {}
    for i, job_id in enumerate(job_ids):
        places.setdefault(partition_in(job_id), []).append(i)
    return [(partition, here[at : at + bite]) for partition, here in places.items() for at in range(0, len(here), bite)]


# ---------------------------------------------------------------- submit


@dataclass(frozen=True, slots=True)
class Receipt:
    """The queue has the job: it will end in exactly one terminal state, whatever dies in between."""

    id: JobId
    is_duplicate: bool = False
    """It was submitted before, by id or idempotency key; `id` is the first one's."""

    ahead_jobs: int | None = None
    """Jobs ahead on its lane, an upper bound; None for a duplicate."""

    ahead_tokens: int | None = None
    state: JobState = JobState.QUEUED

    def __str__(self) -> str:
        return self.id


SubmitAnswer: TypeAlias = Receipt | ProducerError
"""What became of one job of many."""

JOB_OVERHEAD_BYTES = 256
"""Of one job's arguments in a call beside spec and payload."""

CALLS_PER_WAIT = 4
"""Calls of one chunk where the server's disk or replicas are waited for: once for all of them."""


Group: TypeAlias = tuple[Call[list[calls.SubmitAnswer]], list[int]]
"""A call, and the places of its jobs in their chunk."""


@dataclass(slots=True, eq=False)
class Chunk:
    """Jobs that travel together: what fits a call (or several, if they are waited for). Filled, sent, then answered."""

    queue: Queue
    assurance: Assurance = NOTHING_ASKED
    """What is asked of the server behind them."""

    jobs: list[NewJob | ProducerError] = field(default_factory=list[NewJob | ProducerError])
    """In the caller's order; an error stands where a job could not be made."""

    chosen: set[int] = field(default_factory=set[int])
    """Places of jobs whose id the caller chose. A drawn id that is a duplicate is our own, sent twice."""

    num_bytes: int = 0
    _max_calls: int = field(init=False)
    _calls: list[Group] = field(default_factory=list[Group])

    def __post_init__(self) -> None:
        self._max_calls = CALLS_PER_WAIT if self.assurance.is_asked else 1

    def takes(self, job: NewJob) -> bool:
        """Whether this job still fits; a single large one travels alone."""
        if not self.jobs:
            return True
        has_bytes = self.num_bytes + _size(job) <= self._max_calls * limits.MAX_CALL_BYTES
        return has_bytes and len(self.jobs) < self._max_calls * limits.MAX_JOBS_PER_CALL

    def add(self, job: NewJob | ProducerError, *, is_chosen: bool = False) -> None:
        """Put one in."""
        if is_chosen:
            self.chosen.add(len(self.jobs))
        self.jobs.append(job)
        if isinstance(job, NewJob):
            self.num_bytes += _size(job)

    def ask(self) -> Ask:
        """What to send: calls for each partition that has jobs in it. Nothing is added after this."""
        groups: dict[int, list[int]] = {}
        for i, job in enumerate(self.jobs):
            if isinstance(job, NewJob):
                # A new job's id is known to be one: no need to look closer at each.
                groups.setdefault(int(job.id.partition(".")[0]), []).append(i)
        self._calls = [group for partition, places in groups.items() for group in self._cut(partition, places)]
        behind = self.assurance.commands([self.queue.keys(partition) for partition in groups])
        return Ask((*(command_of(call) for call, _ in self._calls), *behind), is_lenient=True)

    def answers(self, replies: Sequence[Reply]) -> list[SubmitAnswer]:
        """What became of each, in the caller's order.

        Raises:
            QueueRefused, AccessDenied: the server refuses the call itself.
        """
        found: dict[int, SubmitAnswer] = {}
        for (call, places), reply in zip(self._calls, replies, strict=False):
            found.update(zip(places, self._read(call, places, reply), strict=True))
        doubt = self.assurance.doubt(replies[len(self._calls) :])
        answers = [job if isinstance(job, ProducerError) else found[i] for i, job in enumerate(self.jobs)]
        return answers if doubt is None else [self._doubted(answer, doubt) for answer in answers]

    def _read(self, call: Call[list[calls.SubmitAnswer]], places: list[int], reply: Reply) -> Iterator[SubmitAnswer]:
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
        return LessDurable(answer.id, str(self.assurance.asked), doubt, receipt=answer)

    def _cut(self, partition: int, places: list[int]) -> Iterator[Group]:
        """The calls that these jobs of one partition need: one, unless several calls' worth are waited for at once."""
        keys, bite, num_bytes = self.queue.keys(partition), list[int](), 0
        if self._max_calls == 1:
            yield self._group(keys, places)
            return
        for place in places:
            size = _size(cast("NewJob", self.jobs[place]))
            if bite and (len(bite) == limits.MAX_JOBS_PER_CALL or num_bytes + size > limits.MAX_CALL_BYTES):
                yield self._group(keys, bite)
                bite, num_bytes = [], 0
            bite.append(place)
            num_bytes += size
        yield self._group(keys, bite)

    def _group(self, keys: QueueKeys, places: list[int]) -> Group:
        return calls.submit(keys, [cast("NewJob", self.jobs[i]) for i in places]), places


def _size(job: NewJob) -> int:
    return len(job.payload) + len(job.spec) + JOB_OVERHEAD_BYTES


class Packer:
    """Cuts jobs into what one call takes."""

    def __init__(self, queue: Queue, assurance: Assurance = NOTHING_ASKED) -> None:
        self._queue = queue
        self._assurance = assurance
        self._chunk = Chunk(queue, assurance)

    def add(self, job: NewJob | ProducerError, *, is_chosen: bool = False) -> Chunk | None:
        """Put one in; returns the chunk before it when that is full."""
        full = None
        if isinstance(job, NewJob) and not self._chunk.takes(job):
            full, self._chunk = self._chunk, Chunk(self._queue, self._assurance)
        self._chunk.add(job, is_chosen=is_chosen)
        return full

    def rest(self) -> Chunk | None:
        """What is left."""
        rest, self._chunk = self._chunk, Chunk(self._queue, self._assurance)
        return rest if rest.jobs else None


def submit(queue: Queue, job: NewJob, assurance: Assurance = NOTHING_ASKED, *, is_chosen: bool) -> Operation[Receipt]:
    """Submit one job.

    Raises:
        QueueFull, QueueRefused, JobTooLarge, InvalidJob, IdempotencyConflict: the queue does not take it.
        LessDurable: it does, but the server has not confirmed what was asked of it.
    """
    chunk = Chunk(queue, assurance)
    chunk.add(job, is_chosen=is_chosen)
    [answer] = chunk.answers((yield chunk.ask()))
    if isinstance(answer, QueueFull):
        answer.retry_after_s = yield from retry_after_s(queue.keys_of(job.id), answer)
    if isinstance(answer, ProducerError):
        raise answer
    return answer


UNKNOWN_WAIT_S = 5.0
"""When to try again where no worker says how fast it is."""


def retry_after_s(keys: QueueKeys, full: QueueFull) -> Operation[float]:
    """When the queue may have room again: the time its workers need for a hundredth of what waits."""
    try:
        view = yield from ask_call(calls.inspect(keys))
    except AccessDenied:  # who may only submit may not look at the workers
        return UNKNOWN_WAIT_S
    if not view.tokens_per_s:
        return UNKNOWN_WAIT_S
    return min(60.0, max(0.2, full.waiting_tokens / 100 / view.tokens_per_s))


def _answer(job: NewJob, answer: calls.SubmitAnswer, *, is_chosen: bool) -> SubmitAnswer:
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


# ---------------------------------------------------------------- looking


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus(JobView):
    """What the queue knows of one job, and when it may begin."""

    starts_in_s: float | None = None
    """An estimate from the tokens ahead on its lane and what the workers say they generate; None: not known."""


def views(queue: Queue, job_ids: Sequence[JobId]) -> Operation[list[JobView | None]]:
    """Look at jobs; None for an unknown one."""
    return (yield from for_jobs(queue, job_ids, calls.status, bite=limits.MAX_JOBS_PER_CALL))


def status(queue: Queue, job_id: JobId) -> Operation[JobStatus]:
    """Look at one job.

    Raises:
        JobNotFound: it is unknown.
    """
    [view] = yield from views(queue, [job_id])
    if view is None:
        raise JobNotFound(job_id)
    facts = {name: getattr(view, name) for name in JobView.__dataclass_fields__}
    if view.state is not JobState.QUEUED:
        return JobStatus(**facts)
    try:
        survey = yield from ask_call(calls.inspect(queue.keys_of(job_id)))
    except AccessDenied:
        return JobStatus(**facts)  # a tenant's reader may not look at the whole queue
    return JobStatus(**facts, starts_in_s=_starts_in_s(view, survey))


def _starts_in_s(view: JobView, queue: QueueView) -> float | None:
    if view.ahead_tokens is None or not queue.tokens_per_s:
        return None
    return view.ahead_tokens / queue.tokens_per_s


def inspect(queue: Queue) -> Operation[list[QueueView]]:
    """Look at every partition of a queue."""
    return (yield from ask_calls([calls.inspect(keys) for keys in queue.all_keys()]))


def batch(queue: Queue, name: str) -> Operation[BatchView]:
    """Look at a batch, over all partitions."""
    return calls.join_batch((yield from ask_calls([calls.inspect_batch(keys, name) for keys in queue.all_keys()])))


def known_batch(queue: Queue, name: str) -> Operation[BatchView]:
    """Look at a batch that must have jobs.

    Raises:
        BatchNotFound: it has none.
    """
    view = yield from batch(queue, name)
    if not view.total:
        raise BatchNotFound(name)
    return view


def close_batch(queue: Queue, name: str, callback_url: str | None) -> Operation[BatchView]:
    """Close a batch: it takes no more jobs, and calls back when all of it has ended, at once if it has.

    Raises:
        BatchNotFound: it has no jobs.
    """
    yield from known_batch(queue, name)
    made = [calls.close_batch(keys, name, callback_url=callback_url) for keys in queue.all_keys()]
    return calls.join_batch((yield from ask_calls(made)))


def queue_names() -> Operation[dict[str, int]]:
    """Every queue on the server, with its number of partitions; scans the whole key space."""
    found: dict[str, int] = {}
    cursor = b"0"
    while True:
        [reply] = yield Ask((("SCAN", cursor, "MATCH", "{*:*}:counters", "COUNT", 1000),))
        cursor, names = cast("tuple[bytes, list[bytes]]", reply)
        for name in names:
            queue, _, partition = name.decode()[1:].partition("}")[0].rpartition(":")
            if queue and partition.isdigit():
                found[queue] = max(found.get(queue, 0), int(partition) + 1)
        if cursor == b"0":
            return found


# ---------------------------------------------------------------- changing


def cancel(queue: Queue, job_ids: Sequence[JobId], reason: str | None) -> Operation[list[str]]:
    """Cancel jobs: for each the state reached, `asked` for a running one, `unknown`."""
    return (yield from for_jobs(queue, job_ids, lambda keys, ids: calls.cancel(keys, ids, reason=reason)))


def known(answer: str, job_id: JobId) -> str:
    """A cancel's answer.

    Raises:
        JobNotFound: the job is unknown.
    """
    if answer == "unknown":
        raise JobNotFound(job_id)
    return answer


def requeue(queue: Queue, job_ids: Sequence[JobId]) -> Operation[list[bool]]:
    """Send failed jobs back; False for one that is not in the dead set."""
    return (yield from for_jobs(queue, job_ids, calls.requeue, is_repeatable=False))


def delete(queue: Queue, job_ids: Sequence[JobId]) -> Operation[list[bool]]:
    """Remove what the queue holds of ended jobs; False for one that has not ended."""
    return (yield from for_jobs(queue, job_ids, calls.delete, is_repeatable=False))


def pause(queue: Queue, *, is_paused: bool) -> Operation[None]:
    """Stop or resume taking jobs."""
    yield from ask_calls([calls.pause(keys, is_paused=is_paused) for keys in queue.all_keys()])


def purge(queue: Queue, tenant: str | None) -> Operation[int]:
    """Cancel every waiting job (of one tenant), in bites; how many."""
    total = 0
    for keys in queue.all_keys():
        has_more = True
        while has_more:
            num_jobs, has_more = yield from ask_call(calls.purge(keys, tenant=tenant))
            total += num_jobs
    return total


def configure(queue: Queue, settings: calls.QueueSettings) -> Operation[None]:
    """Write a queue's settings."""
    yield from ask_calls([calls.configure(keys, settings) for keys in queue.all_keys()])


# ---------------------------------------------------------------- results


class Countdown:
    """Time left for something, or no bound."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._begin_s = monotonic()

    @property
    def passed_s(self) -> float:
        """Seconds since it began."""
        return monotonic() - self._begin_s

    def check(self, what: str) -> None:
        """Give up when the time is over.

        Raises:
            ResultTimeout: it is.
        """
        if self.timeout_s is not None and self.passed_s >= self.timeout_s:
            raise ResultTimeout(f"{what} not ended after {self.timeout_s:g} s; the job goes on. Ask again later.")

    def block_ms(self, most_ms: int) -> int:
        """How long to block: what is left, at most `most_ms`, at least 1 (0 would be for ever)."""
        if self.timeout_s is None:
            return most_ms
        return max(1, min(most_ms, round((self.timeout_s - self.passed_s) * 1000)))


def result(queue: Queue, job_id: JobId, timeout_s: float | None) -> Operation[JobResult]:
    """Wait for a job's end and return its output.

    Raises:
        JobFailed, JobCancelled, JobExpired: it ended otherwise; they carry the output there is.
        ResultTimeout: it has not ended in time.
        ResultExpired: it is done, but its output is no longer kept.
        JobNotFound: it is unknown.
    """
    clock = Countdown(timeout_s)
    while True:
        view, data = yield from _look(queue, job_id)
        if view is None:
            if data is not None:
                return decode_result(data)
            raise JobNotFound(job_id)
        if view.state.is_terminal:
            return outcome(view, data)
        clock.check(f"job {job_id} is still {view.state},")
        yield from _wait_for_end(queue.keys_of(job_id), view, clock)


def _look(queue: Queue, job_id: JobId) -> Operation[tuple[JobView | None, bytes | None]]:
    keys = queue.keys_of(job_id)
    look = calls.status(keys, [job_id])
    # The state first: a result is written before its job is terminal, never after.
    state, data = yield Ask((command_of(look), ("GET", keys.result(job_id))))
    return look.parse(state)[0], cast("bytes | None", data)


def outcome(view: JobView, data: bytes | None) -> JobResult:
    """A job's output, once it has ended.

    Raises:
        JobFailed, JobCancelled, JobExpired, ResultExpired: as in `result`.
    """
    found = decode_result(data) if data is not None else None
    if view.state is not JobState.DONE:
        raise ended_badly(view, found)
    if found is None:
        raise ResultExpired(
            f"job {view.id} is done, but its output has expired. Look in the history: producer jobs show."
        )
    return found


def ended_badly(view: JobView, partial: JobResult | None = None) -> ProducerError:
    """The error that stands for an end other than done."""
    kind = ENDS_BADLY.get(view.state, JobFailed)
    return kind(view.id, view.error or "no reason was given", code=view.error_code, partial=partial)


def _wait_for_end(keys: QueueKeys, view: JobView, clock: Countdown) -> Operation[None]:
    """Let the channels wake us until every choice has its end, or it is time to look at the state again."""
    offsets = [*view.published, *[0] * view.choices]
    cursors = {keys.channel(view.id, choice): f"{offsets[choice]}-0" for choice in range(view.choices)}
    until_s = clock.passed_s + WAIT_BLOCK_MS / 1000
    while cursors and clock.passed_s < until_s:
        found = yield Read(dict(cursors), clock.block_ms(WAIT_BLOCK_MS))
        if not found:
            return
        for key, entries in cast("list[tuple[str, Entries]]", found):
            cursors[key] = entries[-1][0]
            if is_end_id(cursors[key]):
                del cursors[key]
        if cursors:
            # Tokens wake us too: look ever more rarely, so that waiting costs little and never adds much to the wait.
            yield Pause(min(MAX_WAIT_S, WAIT_SHARE * clock.passed_s))


# ---------------------------------------------------------------- reading channels

READ_COUNT = 512
"""Entries of one channel in one read."""


def xread(cursors: Mapping[str, str], *, block_ms: int | None) -> Command:
    """Read what follows the given entry ids, waiting at most `block_ms` (None: not at all)."""
    block: Command = () if block_ms is None else ("BLOCK", block_ms)
    return ("XREAD", "COUNT", READ_COUNT, *block, "STREAMS", *cursors.keys(), *cursors.values())


def channel_entries(reply: Reply) -> Iterator[tuple[str, Entries]]:
    """(key, [(entry id, encoded ChannelEntry)]) of an XREAD's reply."""
    # Redis's own reply: [[key, [[id, [field, value]], …]], …], or nil.
    for key, entries in cast("list[tuple[bytes, Reply]]", reply or []):
        yield key.decode(), channel_rows(entries)


def channel_rows(reply: Reply) -> Entries:
    """(entry id, encoded ChannelEntry) of an XRANGE's reply."""
    return [(entry_id.decode(), fields[1]) for entry_id, fields in cast("list[tuple[bytes, list[bytes]]]", reply)]


def entry_number(entry_id: str) -> tuple[int, int]:
    """An entry id as numbers, which sort as the server sorts."""
    tokens, _, rest = entry_id.partition("-")
    return int(tokens), int(rest)


def is_end_id(entry_id: str) -> bool:
    """Whether a channel's entry is its end: `<offset>-<1 + requeues>`."""
    return not entry_id.endswith("-0")
