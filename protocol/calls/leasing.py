"""Lease jobs from the queue (`pull`) and return them (`give_back`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sluice.protocol import limits
from sluice.protocol.calls.base import Call, Raw, read_text, read_truths
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import pack_for_script
from sluice.protocol.rows import read_lease, read_row
from sluice.protocol.wire import JobId


@dataclass(frozen=True, slots=True)
class Notification:
    """An entry of the notification stream, which wakes one worker."""

    id: str
    chain: str
    """Id of the first notification, if workers that could not take the waiting jobs have passed it on; else `id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """The capacity of a worker for one pull."""

    incarnation: str
    number: int
    """Sequence number of the pull; repeated if its reply was lost."""

    kv_tokens: int
    prefill_tokens: int
    sequences: int
    cache_tokens: int
    """Size of the whole KV cache: no job larger than this is held until there is room."""

    is_empty: bool
    """Whether the worker has no jobs. Only then are suspects leased."""

    holds_oversized: bool = False
    """Whether the worker already holds a job that waits for room."""

    reserve_tokens: int = 256
    """Most output tokens that count towards the cost of a job at admission."""

    own_model: str | None = None
    """Fingerprints of the model, and of it with each adapter, separated by spaces, if only jobs that these began may be
    continued. A job that another one began is set aside for `model_wait_ms`, for another worker: it is not leased, and
    no attempt is counted."""

    model_wait_ms: int = 0

    woken_by: Notification | None = None
    """The notification that this pull acknowledges. If the pull leaves jobs, another worker is woken."""

    over_class: int | None = None
    """None: the room is free. Else a lower class yields it: only jobs of a class above this one are leased, and only
    when they have waited for `IDLE_FIRST_MS`, were returned, or no other worker lives."""


class LeasedJob(NamedTuple):
    """A job leased to this incarnation. A named tuple: one is made per job."""

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
    """Estimate from the submit; the worker counts exactly."""

    published: tuple[int, ...]
    """Tokens on the channel of each choice."""

    ended: tuple[bool, ...]
    """Whether each choice has its end entry."""

    fingerprint: str | None
    """Fingerprint of the model that started the job; None for a first attempt."""

    fits: bool
    """False for the one job that is held until there is room."""

    first_scheduled_ms: int | None = None
    first_token_ms: int | None = None
    resumed_from: str | None = None
    """Incarnation of the previous owner."""

    failures: int = 0
    """Number of retryable failures so far."""

    cost: int = 0
    """Tokens that the job reserved while it waited."""

    deaths: int = 0
    """Deaths of its owners since it last made progress. From the second one on it is a suspect, which runs isolated."""

    resolved: bytes | None = None
    """Encoded ResolvedOptions of the first attempt that published; None before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReply:
    """The reply to a pull."""

    number: int
    jobs: tuple[LeasedJob, ...]
    last_notification: str
    """Last id of the notification stream: an idle worker blocks for entries after it."""

    has_more: bool
    """The slice was full: pull again before blocking."""

    is_paused: bool
    drain_for_suspects: bool
    """This worker is the isolator: it takes no jobs until it is empty, and keeps pulling to remain the isolator."""

    server_ms: int
    look_again_ms: int | None
    """If the room was not free: when the first job that was left to idle workers has waited long enough."""

    due_ms: int | None
    """When `maintain` is due, if it is: now if a heartbeat has expired, else at the next timer or expiry."""


def pull(keys: QueueKeys, request: PullRequest) -> Call[PullReply]:
    """Lease the first jobs that fit, in one step."""
    args = (
        request.incarnation,
        request.number,
        request.kv_tokens,
        request.prefill_tokens,
        request.sequences,
        request.cache_tokens,
        int(request.is_empty),
        int(request.holds_oversized),
        request.reserve_tokens,
        request.own_model or "",
        request.model_wait_ms,
        "" if request.woken_by is None else request.woken_by.id,
        "" if request.woken_by is None else request.woken_by.chain,
        "" if request.over_class is None else request.over_class,
    )
    return Call("pull", keys.fixed(), args, _read_pull)


def _read_pull(reply: Raw) -> PullReply:
    number, jobs, last_notification, has_more, is_paused, drain, now, look_again, due = reply
    return PullReply(
        number=number,
        jobs=tuple(map(_read_leased, jobs[::4], jobs[1::4], jobs[2::4], jobs[3::4])),
        last_notification=last_notification.decode(),
        has_more=bool(has_more),
        is_paused=bool(is_paused),
        drain_for_suspects=bool(drain),
        server_ms=now,
        look_again_ms=look_again,
        due_ms=due,
    )


def _read_leased(job_id: bytes, packed: bytes, payload: bytes, lease: bytes) -> LeasedJob:
    """Parse one job, in the order of `add_leased` in lib_taking.lua.

    One whose seed another program wrote has no options, so that the worker rejects it alone.
    """
    row, held = read_row(packed), read_lease(lease)
    rare, seed = row.rare, int(row.seed)
    return LeasedJob(
        id=JobId(job_id.decode()),
        epoch=row.epoch,
        attempt=row.attempt,
        priority=row.priority,
        spec=row.spec if seed < 2**64 else b"",
        payload=payload,
        seed=seed if seed < 2**64 else 0,
        choices=row.choices,
        submitted_ms=row.submitted_ms,
        pulled_ms=row.started_ms,
        deadline_ms=rare.get(b"deadline"),
        prompt_tokens=row.prompt_tokens,
        published=held.offsets,
        ended=held.ended,
        fingerprint=read_text(rare.get(b"fingerprint")),
        fits=held.mark != b"h",
        first_scheduled_ms=row.first_scheduled_ms,
        first_token_ms=row.first_token_ms,
        resumed_from=read_text(rare.get(b"previous")),
        failures=row.failures,
        cost=row.cost,
        deaths=rare.get(b"deaths", b"").count(b";"),
        resolved=rare.get(b"resolved"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """One job to return to the queue."""

    job_id: JobId
    epoch: int


def give_back(
    keys: QueueKeys, incarnation: str, jobs: Sequence[Returned], *, deregister: bool, broken: bool = False
) -> Call[list[bool]]:
    """Return jobs to the head of the queue; they resume at their next token.

    `deregister`: this is the worker's last call; it is no longer alive. `broken`: the worker cannot continue, and one
    of these jobs may be the cause, so this counts as a death with each of them. At most `MAX_JOBS_PER_CALL` jobs.
    Returns False for a job that this incarnation no longer owns.
    """
    if len(jobs) > limits.MAX_JOBS_PER_CALL:
        raise ValueError(f"{len(jobs)} jobs in one call; at most {limits.MAX_JOBS_PER_CALL}")
    rows = [(job.job_id, job.epoch) for job in jobs]
    return Call(
        "give_back", keys.fixed(), (incarnation, int(deregister), pack_for_script(rows), int(broken)), read_truths
    )


Declined = Literal["returned", "kept", "lost"]
"""What became of a job that its worker's engine declines: another worker gets it; no living one may run it, and the
lease stays; or this incarnation no longer owns it."""


def decline(keys: QueueKeys, incarnation: str, job: Returned) -> Call[Declined]:
    """Return a job that this worker's engine refuses for a living worker with an engine that has not, if there is one.

    Workers whose heartbeats publish the same offer set it aside from now on while there is.
    """
    args = (incarnation, 0, pack_for_script([(job.job_id, job.epoch)]), 0, 1)
    return Call("give_back", keys.fixed(), args, _read_declined)


def _read_declined(reply: Raw) -> Declined:
    (answer,) = reply
    answers: tuple[Declined, ...] = ("lost", "returned", "kept")
    return answers[int(answer)]
