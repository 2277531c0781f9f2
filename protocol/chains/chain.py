"""A chain, and how the queue keeps it: what is read to decide and its jobs apart, because those may be a megabyte."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from sluice.protocol import limits
from sluice.protocol.calls import NewJob
from sluice.protocol.errors import InvalidJob, WireError
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import UNREADABLE, WIRE_VERSION, Reading, open_message, packed
from sluice.protocol.rows import LETTERS
from sluice.protocol.states import RECORDED, JobState
from sluice.protocol.stored_jobs import read_job, stored_job
from sluice.protocol.wire import JobId

MAX_AFTER = 64
"""Most jobs that one waits for."""

_MAX_RECORD_BYTES = 256 * 1024
_MAX_JOBS_BYTES = 2 * (limits.MAX_CALL_BYTES + limits.MAX_PROMPT_BYTES + limits.MAX_SPEC_BYTES)

When = Literal["all", "any"]
OnFailure = Literal["cancel", "release"]

DONE, GONE = LETTERS[JobState.DONE], "-"
"""How a job ended, by the letter in its row: done; or its row has expired or was deleted."""

ENDS: Mapping[str, str] = {LETTERS[state]: state for state in RECORDED if state.is_terminal} | {GONE: "gone"}


@dataclass(frozen=True, slots=True)
class ChainKeys:
    """The keys of a queue's chains, in its partition 0."""

    queue: QueueKeys

    @property
    def chains(self) -> str:
        """Hash: chain id -> what it waits for, and the ids of its jobs. A chain without it is none."""
        return self.queue.key("chains")

    @property
    def jobs(self) -> str:
        """Hash: chain id -> its jobs."""
        return self.queue.key("chains", "jobs")

    @property
    def after(self) -> str:
        """Sorted set of `<job id> <chain id>`, for each job that a chain waits for; every score is 0."""
        return self.queue.key("chains", "after")

    @property
    def blocked(self) -> str:
        """Hash: id of a blocked job -> its chain's id and its number of choices."""
        return self.queue.key("chains", "blocked")

    @property
    def ends(self) -> str:
        """Hash: `<chain id> <job id>` -> the letter of an end that was seen; chain id -> what was decided."""
        return self.queue.key("chains", "ends")

    @property
    def cancelled(self) -> str:
        """Hash: id of a blocked job that must be cancelled -> the reason."""
        return self.queue.key("chains", "cancelled")

    @property
    def num_bytes(self) -> str:
        """Bytes of all chains' jobs, about."""
        return self.queue.key("chains", "bytes")


@dataclass(frozen=True, slots=True)
class After:
    """What jobs wait for.

    Raises:
        InvalidJob: an id is none or given twice, there are too many, or a choice is unknown.
    """

    ids: tuple[JobId, ...]
    when: When = "all"
    """`all`: until all have ended; `any`: until one has. Those that count are as `on_failure` says."""

    on_failure: OnFailure = "cancel"
    """`cancel`: only a job that is done counts; once the others cannot suffice, the blocked jobs are cancelled.
    `release`: every end counts.
    """

    def __post_init__(self) -> None:
        for name, value, allowed in (("when", self.when, When), ("on_failure", self.on_failure, OnFailure)):
            if value not in get_args(allowed):
                raise InvalidJob(f"{name} must be one of {', '.join(get_args(allowed))}, got {value!r:.100}")
        if not 1 <= len(self.ids) <= MAX_AFTER or len(set(self.ids)) < len(self.ids):
            raise InvalidJob(f"after must be 1 to {MAX_AFTER} different jobs, got {len(self.ids)}")
        for job_id in self.ids:
            _tenant_of(job_id)

    def check(self, job_id: JobId) -> None:
        """Check that a job may wait for these, whose outputs it may read.

        Raises:
            InvalidJob: it is one of them, or a job of another tenant.
        """
        if job_id in self.ids:
            raise InvalidJob(f"job {job_id} cannot wait for itself")
        for other in self.ids:
            if _tenant_of(other) != _tenant_of(job_id):
                raise InvalidJob(f"after names job {other} of another tenant than {_tenant_of(job_id)!r}")

    def decided(self, ends: Mapping[JobId, str]) -> bool | None:
        """Return whether to release (True) or to cancel (False); None: not yet. `ends`: letters of those that ended."""
        num_good = sum(letter == DONE or self.on_failure == "release" for letter in ends.values())
        num_bad, needed = len(ends) - num_good, len(self.ids) if self.when == "all" else 1
        return True if num_good >= needed else False if num_bad > len(self.ids) - needed else None

    @property
    def text(self) -> str:
        """What it waits for, as a clause."""
        ending = "be done" if self.on_failure == "cancel" else "end"
        which = "" if len(self.ids) == 1 else f"{self.when} of "
        return f"{which}{listed(self.ids)} to {ending}"


def listed(ids: Sequence[JobId]) -> str:
    """Return ids as a text, of many the first three."""
    others = "" if len(ids) <= 3 else f" and {len(ids) - 3} others"
    return f"{', '.join(ids[:3])}{others}"


def _tenant_of(job_id: str) -> str:
    try:
        return split_job_id(job_id)[1]
    except WireError as error:
        raise InvalidJob(str(error)) from error


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain without its jobs.

    Raises:
        InvalidJob: a job may not wait for the others.
    """

    id: str
    after: After
    job_ids: tuple[JobId, ...]
    outputs: tuple[int, ...]
    """Positions in `after` of the outputs that its prompts use."""

    num_bytes: int

    def __post_init__(self) -> None:
        for job_id in self.job_ids:
            self.after.check(job_id)

    @property
    def members(self) -> list[str]:
        """Its members of `ChainKeys.after`."""
        return [f"{job_id} {self.id}" for job_id in self.after.ids]

    def end_of(self, job_id: str) -> str:
        """Return the field of `ChainKeys.ends` for a job that it waits for."""
        return f"{self.id} {job_id}"


def submitted_ms(chain_id: str) -> int:
    """Return when a chain was submitted, which its id begins with."""
    stated = chain_id.partition("-")[0]
    return int(stated) if stated.isdecimal() else 0


# ---------------------------------------------------------------- as the queue keeps it


def pack_chain(chain: Chain) -> bytes:
    """Encode a chain, except its id."""
    after = chain.after
    jobs = [*chain.job_ids], [*chain.outputs], chain.num_bytes
    return packed([WIRE_VERSION, [*after.ids], after.when, after.on_failure, *jobs])


def read_chain(id_: str, data: bytes) -> Chain:
    """Decode a chain.

    Raises:
        WireError: the bytes are not one.
    """
    _, after, when, on_failure, job_ids, outputs, size, *_ = open_message(data, "chain", _MAX_RECORD_BYTES, at_least=7)
    try:
        return Chain(id_, After(tuple(after), when, on_failure), tuple(job_ids), tuple(outputs), int(size))
    except UNREADABLE as error:
        raise WireError(f"not a chain: {error}") from error


def pack_jobs(jobs: Sequence[NewJob]) -> bytes:
    """Encode the jobs of a chain with their ids."""
    return packed([WIRE_VERSION, {job.id: stored_job(job) for job in jobs}])


def read_jobs(data: bytes) -> dict[JobId, NewJob]:
    """Decode the jobs of a chain.

    Raises:
        WireError: the bytes are not jobs.
    """
    jobs = open_message(data, "chain's jobs", _MAX_JOBS_BYTES, at_least=2)[1]
    with Reading("chain's jobs"):
        return {job_id: read_job(stored, job_id) for job_id, stored in jobs.items()}


def blocked_value(chain_id: str, choices: int) -> str:
    """Return the value of a blocked job in `ChainKeys.blocked`."""
    return f"{chain_id} {choices}"


def read_blocked(ids: Iterable[JobId], reply: object) -> dict[JobId, tuple[str, int]]:
    """Return the chain's id and the choices of each job that is blocked, from the reply to an HMGET."""
    found = dict[JobId, tuple[str, int]]()
    for job_id, value in zip(ids, cast("list[object]", reply), strict=True):
        chain_id, _, choices = value.decode(errors="replace").partition(" ") if isinstance(value, bytes) else ("",) * 3
        if choices.isdecimal():
            found[job_id] = chain_id, int(choices)
    return found


def blocked_of(chain_id: str, ids: Sequence[JobId], reply: object) -> list[JobId]:
    """Return the blocked jobs of a chain, from the reply to an HMGET: a later chain may have taken an id over."""
    return [job_id for job_id, (chain, _) in read_blocked(ids, reply).items() if chain == chain_id]
