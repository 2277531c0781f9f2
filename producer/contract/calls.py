"""One function for each script: typed arguments in, a `Call` out, which knows how to read its reply. No I/O here.

`running.py` runs a Call on a connection. What a script unpacks is packed here and nowhere else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from producer.contract import limits
from producer.contract.keys import QueueKeys
from producer.contract.packing import pack_for_script
from producer.contract.states import JobState
from producer.contract.wire import JobId, WireError, decode_entry, encode_entry, split_job_id

Reply = TypeVar("Reply")
Raw = Any  # a script's reply has no type until it is read
Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Call(Generic[Reply]):
    """A script call before it is made."""

    script: str
    """File name in `scripts/`, without ending."""

    keys: tuple[str, ...]
    args: tuple[Argument, ...]
    parse: Callable[[Raw], Reply]


# ---------------------------------------------------------------- submit


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """One job as `submit` takes it: everything already encoded and counted."""

    id: JobId
    spec: bytes
    payload: bytes
    seed: int
    priority: int = 0
    prompt_tokens: int | None = None
    """Exact for token ids; None lets the script estimate from `prompt_bytes` and the queue's bytes per token."""

    prompt_bytes: int
    max_tokens: int
    choices: int = 1
    idempotency_key: str | None = None
    digest: bytes
    """Of what was asked: the same key or id with another digest is a conflict."""

    batch: str | None = None
    not_before_ms: int | None = None
    ttl_ms: int | None = None
    """Longest wait in the queue, from submit."""

    deadline_ms: int | None = None
    """Wall-clock time by which the job must have ended."""

    wants_callback: bool = False
    features: tuple[str, ...] = ()
    """What a worker must be able to do for it, in the words of `QueueSettings.features`."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The job is on its lane."""

    id: JobId
    ahead_jobs: int
    ahead_tokens: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """It was submitted before; `id` is the first one's."""

    id: JobId
    state: JobState


@dataclass(frozen=True, slots=True)
class Conflict:
    """The id or idempotency key belongs to a different job."""

    id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The queue does not take it; nothing of it was written."""

    reason: Literal[
        "full_jobs",
        "full_tokens",
        "full_bytes",
        "outbox_full",
        "too_large",
        "feature",
        "wrong_type",
        "batch_closed",
        "full_memory",
    ]
    waiting_jobs: int
    waiting_tokens: int
    waiting_bytes: int
    bound: int
    message: str


SubmitAnswer = Accepted | Duplicate | Conflict | Refused


def submit(keys: QueueKeys, jobs: Sequence[NewJob]) -> Call[list[SubmitAnswer]]:
    """Put up to `MAX_JOBS_PER_CALL` jobs on their lanes, each answered apart.

    From the first over a bound on, all new ones are refused, so that order is kept. More than `MAX_CALL_BYTES` in one
    call holds the server for long: cut there (a single larger job travels alone).

    Raises:
        ValueError: too many jobs, one of another partition, or of a priority that does not exist.
    """
    if len(jobs) > limits.MAX_JOBS_PER_CALL:
        raise ValueError(f"{len(jobs)} jobs in one call; at most {limits.MAX_JOBS_PER_CALL}")
    rows = [_job_row(keys, job) for job in jobs]
    return Call("submit", keys.fixed(), (pack_for_script(rows),), _read_submit)


def _job_row(keys: QueueKeys, job: NewJob) -> tuple[object, ...]:
    """The order of `unpacked` in submit.lua."""
    if split_job_id(job.id)[0] != keys.partition:
        raise ValueError(f"job {job.id} belongs to another partition than {keys.partition}")
    if not 0 <= job.priority <= limits.MAX_PRIORITY:
        raise ValueError(f"priority must be in [0, {limits.MAX_PRIORITY}], got {job.priority}")
    return (
        job.id,
        job.spec,
        job.payload,
        str(job.seed),
        job.priority,
        job.prompt_tokens,
        job.prompt_bytes,
        job.max_tokens,
        job.choices,
        job.idempotency_key,
        job.digest,
        job.batch,
        job.not_before_ms,
        job.ttl_ms,
        job.deadline_ms,
        1 if job.wants_callback else None,
        job.features or None,
    )


def _read_submit(reply: Raw) -> list[SubmitAnswer]:
    return [_SUBMIT_ANSWERS[row[0]](row) for row in reply]


def _read_refused(row: Raw) -> Refused:
    _, reason, jobs, tokens, num_bytes, bound, message = row
    return Refused(
        reason=reason.decode(),
        waiting_jobs=jobs,
        waiting_tokens=tokens,
        waiting_bytes=num_bytes,
        bound=bound,
        message=message.decode(errors="replace"),
    )


_SUBMIT_ANSWERS: Mapping[bytes, Callable[[Raw], SubmitAnswer]] = {
    b"accepted": lambda row: Accepted(JobId(row[1].decode()), row[2], row[3]),
    b"duplicate": lambda row: Duplicate(JobId(row[1].decode()), JobState(row[2].decode())),
    b"conflict": lambda row: Conflict(JobId(row[1].decode())),
    b"refused": _read_refused,
}


# ---------------------------------------------------------------- pull


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """What a worker can take now."""

    incarnation: str
    number: int
    """Counts up by one per pull; repeated when the reply was lost."""

    kv_tokens: int
    prefill_tokens: int
    sequences: int
    cache_tokens: int
    """The whole KV cache: a job that does not fit it is never leased as the held one."""

    is_empty: bool
    """Nothing runs and nothing is held: only then may suspects be taken."""

    holds_oversized: bool = False
    """It already holds one job that waits for room."""

    may_reclaim: bool = True
    """False within one life of the worker's own (re)connection, or of a Redis that stood still."""

    reclaim_until_ms: int | None = None
    """By the queue's clock: a pull that is served later reclaims nothing. It has waited for a Redis that stood still,
    and the beats of those who seem dead may lie behind it."""

    reserve_tokens: int = 256
    """Most output tokens counted in a job's cost at admission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedJob:
    """One job that is now this incarnation's."""

    id: JobId
    epoch: int
    attempt: int
    priority: int
    spec: bytes
    payload: bytes
    seed: int
    choices: int
    submitted_ms: int
    pulled_ms: int
    deadline_ms: int | None
    prompt_tokens: int
    """As counted at submit; the worker counts exactly."""

    published: tuple[int, ...]
    """Tokens on the channel of each choice."""

    ended: tuple[bool, ...]
    """Whether each choice has its end entry."""

    fingerprint: str | None
    """Of the model that began it; None for a first attempt."""

    was_reclaimed: bool
    fits: bool
    """False for the one held job that must wait for room."""

    first_scheduled_ms: int | None = None
    first_token_ms: int | None = None
    resumed_from: str | None = None
    """Incarnation of the owner before."""

    failures: int = 0
    """How often it went back with a retryable error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReply:
    """What a pull brought."""

    number: int
    jobs: tuple[LeasedJob, ...]
    bell: str
    """Last id of the bell: an idle worker blocks from here."""

    has_more: bool
    """It stopped at its bite: pull again before sleeping."""

    is_paused: bool
    drain_for_suspects: bool
    """This worker is the isolator: take nothing until it is empty."""

    server_ms: int
    look_again_ms: int | None
    """When the next timer is due, or another's life runs out, if any: do not sleep past it."""


def pull(keys: QueueKeys, request: PullRequest) -> Call[PullReply]:
    """Take the first jobs that fit, leased, in one step; reclaim the dead's; fire due timers."""
    args = (
        request.incarnation,
        request.number,
        request.kv_tokens,
        request.prefill_tokens,
        request.sequences,
        request.cache_tokens,
        int(request.is_empty),
        int(request.holds_oversized),
        int(request.may_reclaim),
        request.reserve_tokens,
        "" if request.reclaim_until_ms is None else request.reclaim_until_ms,
    )
    return Call("pull", keys.fixed(), args, _read_pull)


def _read_pull(reply: Raw) -> PullReply:
    number, jobs, bell, has_more, is_paused, drain, now, look_again = reply
    return PullReply(
        number=number,
        jobs=tuple(map(_read_leased, jobs)),
        bell=bell.decode(),
        has_more=bool(has_more),
        is_paused=bool(is_paused),
        drain_for_suspects=bool(drain),
        server_ms=now,
        look_again_ms=look_again,
    )


def _read_leased(row: Raw) -> LeasedJob:
    """The order of `told` in pull.lua."""
    return LeasedJob(
        id=JobId(row[0].decode()),
        epoch=row[1],
        attempt=row[2],
        priority=row[3],
        spec=row[4],
        payload=row[5],
        seed=int(row[6]),
        choices=row[7],
        submitted_ms=row[8],
        pulled_ms=row[9],
        deadline_ms=row[10],
        prompt_tokens=row[11],
        published=tuple(row[12]),
        ended=tuple(map(bool, row[13])),
        fingerprint=_text(row[14]),
        was_reclaimed=bool(row[15]),
        fits=bool(row[16]),
        first_scheduled_ms=row[17],
        first_token_ms=row[18],
        resumed_from=_text(row[19]),
        failures=row[20],
    )


# ---------------------------------------------------------------- advance


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCall:
    """The end of one choice, in the same call as its last tokens."""

    state: JobState
    reason: str | None
    """Finish reason when done."""

    error: str | None
    error_code: str | None
    result: bytes | None
    """Encoded JobResult of all choices, with the job's last end only (or None if parts were written before)."""

    record: bytes
    """Encoded JobRecord."""

    output_tokens: int
    """Of all choices, to correct the tenant's virtual tokens."""

    retry_in_ms: int | None = None
    """Failed but retryable: return to the stream after this long instead of ending, unless it has failed too often."""

    entry: bytes | None = None
    """Encoded ChannelEntry of the end itself: no tokens, `start` = offset after the last one, the text that only the
    end releases, and its `End`. None: `Progress.entry` carries the end, and is taken apart where it has tokens too (all
    its text then stays with the tokens)."""

    result_bytes: int | None = None
    """Length of a result that was written in parts (`put_result`); `result` is None then."""


class Progress(NamedTuple):
    """What one step added to one choice of one job. A named tuple, as one is made for each of them: write the names."""

    job_id: JobId
    epoch: int
    choice: int
    start: int
    num_tokens: int
    entry: bytes
    """Encoded ChannelEntry, opaque."""

    first_scheduled_ms: int | None = None
    """With the first advance that carries it; so the next three."""

    first_token_ms: int | None = None
    prompt_tokens: int | None = None
    fingerprint: str | None = None
    end: EndCall | None = None


@dataclass(frozen=True, slots=True)
class Ok:
    """Appended."""

    stop: JobState | None = None
    """The job is flagged: send an end with this state."""


@dataclass(frozen=True, slots=True)
class Already:
    """All of it was there."""

    stop: JobState | None = None


@dataclass(frozen=True, slots=True)
class SendFrom:
    """The channel is at `offset`: send again from there."""

    offset: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """Another owner has it: drop the sequence."""


@dataclass(frozen=True, slots=True)
class Retried:
    """The job went back to the stream, as its end had asked: it is nobody's until its time comes."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A key of this job has the wrong type: the job was put in the dead set with this reason; drop the sequence."""

    reason: str


AdvanceAnswer = Ok | Already | SendFrom | Replaced | Retried | Broken


def advance(keys: QueueKeys, incarnation: str, progress: Sequence[Progress]) -> Call[list[AdvanceAnswer]]:
    """Append tokens and ends of one step, fenced by (incarnation, epoch), each choice answered apart.

    Raises:
        ValueError: too many in one call.
    """
    if len(progress) > limits.MAX_JOBS_PER_CALL:
        raise ValueError(f"{len(progress)} in one call; at most {limits.MAX_JOBS_PER_CALL}")
    rows = [_progress_row(one) for one in progress]
    return Call("advance", keys.fixed(), (incarnation, pack_for_script(rows)), _read_advance)


def _progress_row(one: Progress) -> tuple[object, ...]:
    """The order of `advance` in advance.lua; what most steps do not have is left out at the end."""
    # By place: job to entry, the four extras, the end.
    row, extras = one[:6], one[6:10]
    has_extras = extras != _NO_EXTRAS
    if one.end is None:
        return (*row, extras) if has_extras else row
    entry, end_entry = _entries(one, one.end)
    return (*row[:5], entry, extras if has_extras else None, _end_row(one.end, end_entry))


_NO_EXTRAS = (None, None, None, None)


def _entries(one: Progress, end: EndCall) -> tuple[bytes, bytes]:
    """The entry of the tokens and that of the end: two, so that a requeue can take back the end alone."""
    if end.entry is not None:
        return one.entry, end.entry
    if one.num_tokens == 0:
        return b"", one.entry
    both = decode_entry(one.entry)
    bare = both._replace(start=one.start + one.num_tokens, token_ids=(), text="", logprobs=None)
    return encode_entry(both._replace(end=None)), encode_entry(bare)


def _end_row(end: EndCall, entry: bytes) -> tuple[object, ...]:
    """The order of `how_of` in advance.lua."""
    return (
        str(end.state),
        end.reason,
        end.error,
        end.error_code,
        end.result,
        end.record,
        end.output_tokens,
        end.retry_in_ms,
        entry,
        end.result_bytes,
    )


def _read_advance(reply: Raw) -> list[AdvanceAnswer]:
    return [_OK if word == b"ok" else _read_answer(word.decode(errors="replace")) for word in reply]


_OK = Ok()


def _read_answer(word: str) -> AdvanceAnswer:
    kind, _, rest = word.partition(" ")
    match kind:
        case "ok":
            return Ok(JobState(rest))
        case "already":
            return Already(JobState(rest) if rest else None)
        case "at":
            return SendFrom(int(rest))
        case "replaced":
            return Replaced()
        case "retried":
            return Retried()
        case _:
            return Broken(rest)


# ---------------------------------------------------------------- life


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A worker shows that it lives."""

    incarnation: str
    held: tuple[JobId, ...]
    processed_pull: int
    """Number of the last pull whose jobs are all in `held` (or ended)."""

    life_ms: int
    about: Mapping[str, str] = field(default_factory=dict[str, str])
    """Host, pid, device, version, model, running, waiting …: shown by `worker status`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatReply:
    """What the queue tells a living worker."""

    server_ms: int
    was_dead: bool
    """Its life had run out (it was slow); jobs not yet taken over are still its own."""

    stops: tuple[tuple[JobId, JobState], ...]
    """Flagged jobs: send an end with that state."""

    lost: tuple[JobId, ...]
    """Jobs in `held` whose lease is another's now: drop them."""


def beat(keys: QueueKeys, beat: Beat) -> Call[BeatReply]:
    """Renew this incarnation's life, fire due timers, give back leases whose pull reply was lost."""
    about = [text for pair in beat.about.items() for text in pair]
    args = (beat.incarnation, beat.processed_pull, beat.life_ms, pack_for_script(beat.held), *about)
    return Call("beat", keys.fixed(), args, _read_beat)


def _read_beat(reply: Raw) -> BeatReply:
    now, was_dead, stops, lost = reply
    words = [one.decode() for one in stops]
    pairs = zip(words[::2], words[1::2], strict=True)
    return BeatReply(
        server_ms=now,
        was_dead=bool(was_dead),
        stops=tuple((JobId(job_id), JobState(state)) for job_id, state in pairs),
        lost=tuple(JobId(one.decode()) for one in lost),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """One job that goes back to the stream."""

    job_id: JobId
    epoch: int


def give_back(
    keys: QueueKeys, incarnation: str, jobs: Sequence[Returned], *, farewell: bool, broken: bool = False
) -> Call[list[bool]]:
    """Return jobs to the head of the queue, where they go on at their next token; `farewell` ends the incarnation.

    `broken`: the worker cannot go on, and one of these may be why: it counts as a death by the rule of suspects.
    At most `MAX_JOBS_PER_CALL` a call. False for a job that is not this incarnation's any more.
    """
    if len(jobs) > limits.MAX_JOBS_PER_CALL:
        raise ValueError(f"{len(jobs)} jobs in one call; at most {limits.MAX_JOBS_PER_CALL}")
    rows = [(job.job_id, job.epoch) for job in jobs]
    return Call(
        "give_back", keys.fixed(), (incarnation, int(farewell), pack_for_script(rows), int(broken)), _read_truths
    )


def _read_truths(reply: Raw) -> list[bool]:
    return [bool(one) for one in reply]


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


# ---------------------------------------------------------------- control


def cancel(keys: QueueKeys, job_ids: Sequence[JobId], *, reason: str | None = None) -> Call[list[str]]:
    """Cancel jobs: a waiting one ends at once, a running one is flagged.

    Answers one of JobState (the state reached), `asked` or `unknown` per job; at most `MAX_BITE` jobs a call.
    """
    return Call("cancel", keys.fixed(), (reason or "", pack_for_script(_bite(job_ids))), _read_words)


def _bite(job_ids: Sequence[JobId]) -> Sequence[JobId]:
    if len(job_ids) > limits.MAX_BITE:
        raise ValueError(f"{len(job_ids)} jobs in one call; at most {limits.MAX_BITE}")
    return job_ids


def _read_words(reply: Raw) -> list[str]:
    return [one.decode(errors="replace") for one in reply]  # a state may be what somebody else wrote


def requeue(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[bool]]:
    """Send failed jobs from the dead set back to the stream; they go on after the tokens they have.

    False for one that has not failed, or whose prompt is gone; at most `MAX_BITE` jobs a call.
    """
    return Call("requeue", keys.fixed(), (pack_for_script(_bite(job_ids)),), _read_truths)


def pause(keys: QueueKeys, *, is_paused: bool) -> Call[None]:
    """Stop or resume pull and reclaim, and nothing else."""
    return Call("configure", keys.fixed(), ("paused", "1" if is_paused else ""), _read_nothing)


def _read_nothing(reply: Raw) -> None:
    return None


def purge(keys: QueueKeys, *, tenant: str | None = None) -> Call[tuple[int, bool]]:
    """Cancel one bite of waiting jobs: (how many, whether more are left)."""
    return Call("purge", keys.fixed(), (tenant or "",), lambda reply: (reply[0], bool(reply[1])))


def delete(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[bool]]:
    """Remove every key of ended jobs; False for one that has not ended. At most `MAX_BITE` jobs a call."""
    return Call("delete", keys.fixed(), (pack_for_script(_bite(job_ids)),), _read_truths)


def fire_timers(keys: QueueKeys) -> Call[tuple[int, int | None]]:
    """Fire one bite of due timers, as every pull and beat does: (how many, when the next is due)."""
    return Call("timers", keys.fixed(), (), lambda reply: (reply[0], reply[1]))


def put_result(keys: QueueKeys, incarnation: str, job_id: JobId, epoch: int, *, offset: int, part: bytes) -> Call[str]:
    """Write one part of a large result, in order from offset 0: `ok`, `replaced` or `too_large`.

    The end then names its length (`EndCall.result_bytes`). An end whose parts are not all there is answered `SendFrom`
    with the offset it was sent at: put them again first.
    """
    return Call("put_result", keys.fixed(), (incarnation, job_id, epoch, offset, part), lambda reply: reply.decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """Numbers of one batch in one partition, or joined over all."""

    id: str
    is_closed: bool
    total: int
    done: int
    failed: int
    cancelled: int
    expired: int
    completed_ms: int | None
    """When the last of a closed batch ended."""

    deadline_ms: int | None = None
    """When what has not ended of it expires."""

    @property
    def ended(self) -> int:
        """Jobs of it that have ended."""
        return self.done + self.failed + self.cancelled + self.expired


def join_batch(parts: Sequence[BatchView]) -> BatchView:
    """One batch over all partitions: it is closed, or complete, when it is in each."""
    completed = [part.completed_ms for part in parts]
    return BatchView(
        id=parts[0].id,
        is_closed=all(part.is_closed for part in parts),
        total=sum(part.total for part in parts),
        done=sum(part.done for part in parts),
        failed=sum(part.failed for part in parts),
        cancelled=sum(part.cancelled for part in parts),
        expired=sum(part.expired for part in parts),
        completed_ms=None if None in completed else max(ms for ms in completed if ms is not None),
        deadline_ms=max((part.deadline_ms for part in parts if part.deadline_ms is not None), default=None),
    )


def close_batch(keys: QueueKeys, batch: str, *, callback_url: str | None = None) -> Call[BatchView]:
    """Close a batch: it takes no more jobs, and writes one callback when all of it has ended."""
    return Call("close_batch", keys.fixed(), (batch, callback_url or ""), lambda reply: _read_batch(batch, reply))


def cancel_batch(keys: QueueKeys, batch: str, *, reason: str | None = None) -> Call[tuple[int, int, bool]]:
    """Close a batch and cancel one bite of its jobs: (how many ended, how many were asked, whether more are left)."""
    args = (batch, reason or "")
    return Call("cancel_batch", keys.fixed(), args, lambda reply: (reply[0], reply[1], bool(reply[2])))


def expire_batch(keys: QueueKeys, batch: str, *, deadline_ms: int) -> Call[BatchView]:
    """Give a batch a deadline: when it passes, the batch is closed, and jobs of it that have not ended expire."""
    return Call("expire_batch", keys.fixed(), (batch, deadline_ms), lambda reply: _read_batch(batch, reply))


def inspect_batch(keys: QueueKeys, batch: str) -> Call[BatchView]:
    """Look at a batch; one that is unknown here has no jobs."""
    return Call("inspect_batch", keys.fixed(), (batch,), lambda reply: _read_batch(batch, reply))


def _read_batch(batch: str, reply: Raw) -> BatchView:
    numbers = _flat(reply)
    completed, deadline = numbers.get("completed"), numbers.get("deadline")
    return BatchView(
        id=batch,
        is_closed=numbers.get("closed") == "1",
        total=int(numbers.get("total", 0)),
        done=int(numbers.get("done", 0)),
        failed=int(numbers.get("failed", 0)),
        cancelled=int(numbers.get("cancelled", 0)),
        expired=int(numbers.get("expired", 0)),
        completed_ms=int(completed) if completed else None,
        deadline_ms=int(deadline) if deadline else None,
    )


def _flat(reply: Raw) -> dict[str, str]:
    """A map that came as name, value, name, value …"""
    words = [one.decode(errors="replace") for one in reply]
    return dict(zip(words[::2], words[1::2], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Bounds and behaviour of a queue; None leaves a value as it is."""

    max_waiting_jobs: int | None = None
    max_waiting_tokens: int | None = None
    max_waiting_bytes: int | None = None
    max_outbox_entries: int | None = None
    durability: str | None = None
    """Of submits that do not say it themselves: memory, aof, fsync or replica:N."""

    max_job_tokens: int | None = None
    """A job whose prompt + max_tokens exceeds this is refused at submit."""

    features: tuple[str, ...] | None = None
    partitions: int | None = None
    """How many the queue has, as its workers serve it; who counts otherwise is refused."""

    bytes_per_token: float | None = None
    mode: Literal["fifo", "fair", "deadline"] | None = None
    age_step_ms: int | None = None
    """0: strict priority classes, no ageing."""

    weights: Mapping[str, float] | None = None
    """Tenant to weight, for mode fair."""

    channel_ttl_ms: int | None = None
    result_ttl_ms: int | None = None
    idempotency_ttl_ms: int | None = None
    keep_prompts: Literal["none", "hash", "full"] | None = None
    keep_results: bool | None = None
    export_batches: bool | None = None
    """Every batch that completes is told to `worker callbacks`, not only those with a URL."""

    max_failures: int | None = None
    """A job that fails with a retryable error this often ends failed. Deaths of workers are not counted here."""

    reserve_tokens: int | None = None
    """Most output tokens of one choice that are counted in a waiting job's cost."""

    ms_per_token: float | None = None
    """For mode deadline: what a token of cost is taken to need."""

    dead_set_max: int | None = None
    test_clock_ms: int | None = None
    """For tests alone: stops the queue's clock at this time, so that no test waits."""

    test_clock_offset_ms: int | None = None
    """For tests alone: moves the queue's clock against the server's."""


def configure(keys: QueueKeys, settings: QueueSettings) -> Call[None]:
    """Write settings of a queue (a worker states max_job_tokens, features and partitions at start)."""
    pairs = [(one.name, getattr(settings, one.name)) for one in fields(settings) if one.name != "weights"]
    pairs += [(f"weight:{tenant}", weight) for tenant, weight in (settings.weights or {}).items()]
    flat = [text for name, value in pairs if value is not None for text in (name, _setting(value))]
    return Call("configure", keys.fixed(), tuple(flat), _read_nothing)


def _setting(value: Raw) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, (int, float, str)) else ",".join(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker that died without farewell while it held a job."""

    incarnation: str
    mates: int
    """Other jobs that it held."""

    is_apart: bool
    """It ran suspects alone."""

    number: int
    """Of all deaths in the partition: how many workers died meanwhile without the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """What the queue knows of one job; reading never writes."""

    id: JobId
    state: JobState
    version: int
    priority: int
    submitted_ms: int
    started_ms: int | None
    ended_ms: int | None
    attempt: int
    owner: str | None
    prompt_tokens: int
    cost: int
    choices: int
    published: tuple[int, ...]
    error: str | None
    error_code: str | None
    finish_reason: str | None
    batch: str | None
    spec: bytes | None
    seed: int
    ahead_jobs: int | None
    """Jobs (and tokens) ahead on its lane, an upper bound; None unless queued."""

    ahead_tokens: int | None
    has_result: bool
    first_scheduled_ms: int | None = None
    """As the worker said with its first advance; so the next two. They make the latency table without a history."""

    first_token_ms: int | None = None
    output_tokens: int | None = None
    """Of all choices, of an ended job."""

    asked: JobState | None = None
    """The end that a running job was asked to come to."""

    requeues: int = 0
    failures: int = 0
    """How often it went back with a retryable error; `error` is the last one's."""

    deaths: tuple[Death, ...] = ()
    """Workers that died with it since it last made progress."""


def status(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[JobView | None]]:
    """Look at jobs; None for one that is unknown (or forgotten). At most `MAX_JOBS_PER_CALL` a call."""
    return Call("status", keys.fixed(), (pack_for_script(job_ids),), _read_status)


def _read_status(reply: Raw) -> list[JobView | None]:
    return [None if row is None else _checked_view(row) for row in reply]


def _checked_view(row: Raw) -> JobView:
    """As `_read_view`, of a job that somebody else may have written to.

    Raises:
        WireError: somebody has.
    """
    try:
        return _read_view(row)
    except (ValueError, TypeError, AttributeError) as error:
        raise WireError(f"what the queue holds of job {row[0]!r} cannot be read: {error}") from error


def _read_view(row: Raw) -> JobView:
    """The order of `look` in status.lua."""
    asked = _text(row[24])
    return JobView(
        id=JobId(row[0].decode()),
        state=JobState(row[1].decode()),
        version=row[2],
        priority=row[3],
        submitted_ms=row[4],
        started_ms=row[5],
        ended_ms=row[6],
        attempt=row[7],
        owner=_text(row[8]),
        prompt_tokens=row[9],
        cost=row[10],
        choices=row[11],
        published=tuple(row[12]),
        error=_text(row[13]),
        error_code=_text(row[14]),
        finish_reason=_text(row[15]),
        batch=_text(row[16]),
        spec=row[17],
        seed=int(row[18]),
        ahead_jobs=row[19],
        ahead_tokens=row[20],
        has_result=bool(row[21]),
        first_scheduled_ms=row[22],
        first_token_ms=row[23],
        asked=None if asked is None else JobState(asked),
        requeues=row[25],
        output_tokens=row[26],
        failures=row[27],
        deaths=tuple(map(_read_death, (_text(row[28]) or "").split(";")[:-1])),
    )


def _read_death(listed: str) -> Death:
    incarnation, mates, apart, number = listed.split(",")
    return Death(incarnation=incarnation, mates=int(mates), is_apart=apart == "1", number=int(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """What a partition holds now."""

    waiting_jobs: int
    waiting_tokens: int
    waiting_bytes: int
    running_jobs: int
    worker_deaths: int
    """How often a life ran out without farewell, of slow workers too, or a worker broke."""

    oldest_ms: int | None
    """Submit time of the oldest waiting job."""

    is_paused: bool
    totals: Mapping[str, int]
    """Jobs ever submitted and ended, by state."""

    dead: int
    suspects: int
    outbox_entries: int
    callback_entries: int
    """Ends that wait for `worker callbacks`."""

    workers: Mapping[str, Mapping[str, str]]
    """Living incarnations and what they say of themselves."""

    lanes: tuple[tuple[str, str, int, int], ...]
    """(class, tenant, jobs, tokens) of up to 100 lanes with waiting entries."""

    settings: Mapping[str, str]
    server_ms: int
    tokens_per_s: float | None
    """Output tokens per second of all living workers, as they say (`tokens_per_s` in `Beat.about`); None when none
    says; for the estimate of a start."""


def inspect(keys: QueueKeys) -> Call[QueueView]:
    """Look at a queue; reading never writes."""
    return Call("inspect", keys.fixed(), (), _read_queue)


def _read_queue(reply: Raw) -> QueueView:
    now, counters, settings, oldest, dead, suspects, outbox, workers, lanes, callbacks = reply
    numbers = {name: int(value) for name, value in _flat(counters).items()}
    living = {name.decode(): _flat(about) for name, about in zip(workers[::2], workers[1::2], strict=True)}
    known = _flat(settings)
    return QueueView(
        waiting_jobs=numbers.pop("waiting_jobs", 0),
        waiting_tokens=numbers.pop("waiting_tokens", 0),
        waiting_bytes=numbers.pop("waiting_bytes", 0),
        running_jobs=numbers.pop("running_jobs", 0),
        worker_deaths=numbers.pop("worker_deaths", 0),
        oldest_ms=oldest,
        is_paused=known.get("paused") == "1",
        totals=numbers,
        dead=dead,
        suspects=suspects,
        outbox_entries=outbox,
        callback_entries=callbacks,
        workers=living,
        lanes=tuple((lane[0].decode(), lane[1].decode(), lane[2], lane[3]) for lane in lanes),
        settings=known,
        server_ms=now,
        tokens_per_s=_sum_of_rates(living),
    )


def _sum_of_rates(workers: Mapping[str, Mapping[str, str]]) -> float | None:
    rates = [about["tokens_per_s"] for about in workers.values() if "tokens_per_s" in about]
    return sum(map(float, rates)) if rates else None
