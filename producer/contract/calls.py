"""One function for each script: typed arguments in, a `Call` out, which knows how to read its reply. No I/O here.

`running.py` runs a Call on a connection. What a script unpacks is packed here and nowhere else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from producer.contract.keys import QueueKeys
from producer.contract.states import JobState
from producer.contract.wire import JobId

Reply = TypeVar("Reply")
Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Call(Generic[Reply]):
    """A script call before it is made."""

    script: str
    """File name in `scripts/`, without ending."""

    keys: tuple[str, ...]
    args: tuple[Argument, ...]
    parse: Callable[[object], Reply]


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
        "full_jobs", "full_tokens", "full_bytes", "outbox_full", "too_large", "feature", "paused", "wrong_type"
    ]
    waiting_jobs: int
    waiting_tokens: int
    waiting_bytes: int
    bound: int
    message: str


SubmitAnswer = Accepted | Duplicate | Conflict | Refused


def submit(keys: QueueKeys, jobs: Sequence[NewJob]) -> Call[list[SubmitAnswer]]:
    """Put up to `MAX_JOBS_PER_CALL` jobs on their lanes, each answered apart.

    From the first over a bound on, all new ones are refused, so that order is kept.
    """
    raise NotImplementedError


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
    """False within one life of the worker's own (re)connection."""

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
    next_timer_ms: int | None
    """When the next timer is due, if any: do not sleep past it."""


def pull(keys: QueueKeys, request: PullRequest) -> Call[PullReply]:
    """Take the first jobs that fit, leased, in one step; reclaim the dead's; fire due timers."""
    raise NotImplementedError


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
    """Failed but retryable: return to the stream after this long instead of ending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one step added to one choice of one job."""

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
class Broken:
    """A key of this job has the wrong type: the job was put in the dead set with this reason; drop the sequence."""

    reason: str


AdvanceAnswer = Ok | Already | SendFrom | Replaced | Broken


def advance(keys: QueueKeys, incarnation: str, progress: Sequence[Progress]) -> Call[list[AdvanceAnswer]]:
    """Append tokens and ends of one step, fenced by (incarnation, epoch), each choice answered apart."""
    raise NotImplementedError


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
    raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """One job that goes back to the stream."""

    job_id: JobId
    epoch: int
    published_tokens: int
    """All choices; part of the cost it comes back with."""


def give_back(keys: QueueKeys, incarnation: str, jobs: Sequence[Returned], *, farewell: bool) -> Call[list[bool]]:
    """Return jobs to the head of the queue, where they go on at their next token; `farewell` ends the incarnation."""
    raise NotImplementedError


# ---------------------------------------------------------------- control


class CancelOutcome(str):
    """The state reached (a JobState), or `asked` for a running job, or `unknown`."""


def cancel(keys: QueueKeys, job_ids: Sequence[JobId], *, reason: str | None = None) -> Call[list[str]]:
    """Cancel jobs: a waiting one ends at once, a running one is flagged.

    Answers one of JobState (the state reached), `asked` or `unknown` per job.
    """
    raise NotImplementedError


def requeue(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[bool]]:
    """Send failed jobs from the dead set back to the stream; they go on after the tokens they have."""
    raise NotImplementedError


def pause(keys: QueueKeys, *, is_paused: bool) -> Call[None]:
    """Stop or resume pull and reclaim."""
    raise NotImplementedError


def purge(keys: QueueKeys, *, tenant: str | None = None) -> Call[tuple[int, bool]]:
    """Cancel one bite of waiting jobs: (how many, whether more are left)."""
    raise NotImplementedError


def delete(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[bool]]:
    """Remove every key of ended jobs; False for one that has not ended."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Bounds and behaviour of a queue; None leaves a value as it is."""

    max_waiting_jobs: int | None = None
    max_waiting_tokens: int | None = None
    max_waiting_bytes: int | None = None
    max_outbox_entries: int | None = None
    max_job_tokens: int | None = None
    """A job whose prompt + max_tokens exceeds this is refused at submit."""

    features: tuple[str, ...] | None = None
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
    max_attempts: int | None = None


def configure(keys: QueueKeys, settings: QueueSettings) -> Call[None]:
    """Write settings of a queue (a worker states max_job_tokens and features at start)."""
    raise NotImplementedError


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


def status(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[JobView | None]]:
    """Look at jobs; None for one that is unknown (or forgotten)."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """What a partition holds now."""

    waiting_jobs: int
    waiting_tokens: int
    waiting_bytes: int
    running_jobs: int
    oldest_ms: int | None
    """Submit time of the oldest waiting job."""

    is_paused: bool
    totals: Mapping[str, int]
    """Jobs ever submitted and ended, by state."""

    dead: int
    suspects: int
    outbox_entries: int
    workers: Mapping[str, Mapping[str, str]]
    """Living incarnations and what they say of themselves."""

    lanes: tuple[tuple[str, str, int, int], ...]
    """(class, tenant, jobs, tokens) of up to 100 lanes with waiting entries."""

    settings: Mapping[str, str]
    server_ms: int
    tokens_per_s: float | None
    """Output tokens per second of all living workers, as they say; for the estimate of a start."""


def inspect(keys: QueueKeys) -> Call[QueueView]:
    """Look at a queue."""
    raise NotImplementedError
