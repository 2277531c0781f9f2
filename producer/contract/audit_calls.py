"""The calls of `worker audit`: what looks at a queue without writing, and what mends it. As in `calls`, no I/O here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from producer.contract import limits
from producer.contract.calls import Call
from producer.contract.keys import QueueKeys
from producer.contract.packing import pack_for_script
from producer.contract.states import JobState
from producer.contract.wire import JobId

Raw = Any  # a script's reply has no type until it is read

AUDIT_BITE = 16
"""Jobs in one look: the server stands still for them."""

LANE_BITE = 64
"""Entries of a lane in one look, which costs a quarter of a job's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What a queue says of one job, in its hash and in every place beside it, at one instant."""

    id: JobId
    trouble: str | None
    """Why there is no job: `unknown`, or `wrong type` and `not a job`, where its keys are foreign."""

    state: JobState | None
    version: int
    cost: int
    bytes: int
    epoch: int
    entry: str | None
    """Its entry, as the hash says; so the lane."""

    lane: str | None
    has_entry: bool
    """The entry is on the lane, and is this job's."""

    is_delayed: bool
    is_suspect: bool
    has_timer: bool
    """One that will make it due."""

    owner: str | None
    """Of its lease: empty when given back, None where it has no lease."""

    lease_epoch: int
    is_held: bool
    is_owner_listed: bool
    """Among the living (or the dead whose jobs will be taken over)."""

    has_payload: bool
    dead_ms: float | None
    """Since when it is in the dead set."""

    ended_ms: int | None
    submitted_ms: int | None
    seen_ms: int

    @property
    def num_places(self) -> int:
        """Where it waits: one, if it is queued."""
        return self.has_entry + self.is_delayed + self.is_suspect


def audit_jobs(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[Picture]]:
    """Look at up to `AUDIT_BITE` jobs, each with all that speaks of it; reading never writes."""

    def read(reply: Raw) -> list[Picture]:
        now, rows = reply
        return [_read_picture(job_id, row, now) for job_id, row in zip(job_ids, rows, strict=True)]

    return Call("audit_jobs", keys.fixed(), (pack_for_script(job_ids),), read)


def _read_picture(job_id: JobId, row: Raw, now: int) -> Picture:
    """The order of `picture_of` in audit_jobs.lua."""
    return Picture(
        id=job_id,
        trouble=_text(row[0]),
        state=None if row[1] is None else JobState(row[1].decode()),
        version=row[2],
        cost=row[3],
        bytes=row[4],
        epoch=row[5],
        entry=_text(row[6]),
        lane=_text(row[7]),
        has_entry=bool(row[8]),
        is_delayed=bool(row[9]),
        is_suspect=bool(row[10]),
        has_timer=bool(row[11]),
        owner=_text(row[12]),
        lease_epoch=row[13],
        is_held=bool(row[14]),
        is_owner_listed=bool(row[15]),
        has_payload=bool(row[16]),
        dead_ms=row[17],
        ended_ms=row[18],
        submitted_ms=row[19],
        seen_ms=now,
    )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayEntry:
    """An entry that no job stands behind."""

    entry: str
    job: str | None
    """What it names."""

    state: str | None
    """Of that job, if there is one; so its own entry."""

    job_entry: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneView:
    """Some entries of a lane, beside their jobs."""

    last: str | None
    """None: there are no more."""

    tokens: int
    """By the entries; the next two by their jobs."""

    job_tokens: int
    job_bytes: int
    strays: tuple[StrayEntry, ...]


def audit_lane(keys: QueueKeys, lane: str, after: str | None) -> Call[LaneView]:
    """Look at up to `LANE_BITE` entries of a lane (`<class>:<tenant>`) behind one, or the first; it writes nothing."""
    return Call("audit_lane", keys.fixed(), (lane, f"({after}" if after else "-", LANE_BITE), _read_lane)


def _read_lane(reply: Raw) -> LaneView:
    last, tokens, job_tokens, job_bytes, strays = reply
    return LaneView(
        last=_text(last),
        tokens=tokens,
        job_tokens=job_tokens,
        job_bytes=job_bytes,
        strays=tuple(
            StrayEntry(entry=row[0].decode(), job=_text(row[1]), state=_text(row[2]), job_entry=_text(row[3]))
            for row in strays
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneDepth:
    """A lane whose number in `depth` is not its length."""

    lane: str
    stated: str
    entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The counters of a partition, beside what they count, at one instant."""

    stamp: str
    """Changes with each change of a job's state."""

    counters: Mapping[str, int]
    waiting_jobs: int
    """On lanes, not due, and suspects, counted; so the next one."""

    running_jobs: int
    wrong_lanes: tuple[LaneDepth, ...]
    unlisted_lanes: tuple[str, ...]
    """They have entries, and no pull finds them."""

    outbox_entries: int
    outbox_first: str | None


def audit_counts(keys: QueueKeys, lanes: Sequence[str]) -> Call[Counts]:
    """Look at the counters; `lanes` are those whose keys were seen. Costs a command for each lane and worker."""
    return Call("audit_counts", keys.fixed(), (pack_for_script(lanes),), _read_counts)


def _read_counts(reply: Raw) -> Counts:
    stamp, flat, waiting, running, wrong_lanes, outbox, first, unlisted = reply
    counters = {name.decode(): int(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
    return Counts(
        stamp=stamp.decode(),
        counters=counters,
        waiting_jobs=waiting,
        running_jobs=running,
        wrong_lanes=tuple(LaneDepth(lane=a.decode(), stated=b.decode(), entries=c) for a, b, c in wrong_lanes),
        unlisted_lanes=tuple(lane.decode() for lane in unlisted),
        outbox_entries=outbox,
        outbox_first=_text(first),
    )


# ---------------------------------------------------------------- mending


def mend_jobs(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[str]]:
    """Let leases and places of jobs follow from their states again; says what was done, or '' for a sound job."""
    _check_bite(job_ids)
    return Call("mend_jobs", keys.fixed(), (pack_for_script(job_ids),), lambda reply: [one.decode() for one in reply])


def mend_lane(keys: QueueKeys, lane: str, entries: Sequence[str]) -> Call[list[bool]]:
    """Take entries off a lane (`<class>:<tenant>`) that no job stands behind."""
    _check_bite(entries)
    priority, _, tenant = lane.partition(":")
    return Call("mend_lane", keys.fixed(), (priority, tenant, pack_for_script(entries)), _read_truths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What all that waits adds up to, and when: tokens and bytes, and tokens of each lane by its text in `depth`."""

    stamp: str = ""
    """Empty: jobs came and went meanwhile, so these are no sums."""

    tokens: int = 0
    bytes: int = 0
    lanes: tuple[tuple[str, str, int], ...] = ()


def mend_counters(keys: QueueKeys, lanes: Sequence[str], sums: Sums) -> Call[list[str]]:
    """Set counters and depths to what is there; names those that were changed. `lanes` as in `audit_counts`."""
    args = (pack_for_script(lanes), sums.stamp, sums.tokens, sums.bytes, pack_for_script(sums.lanes))
    return Call("mend_counters", keys.fixed(), args, lambda reply: [one.decode() for one in reply])


def tell_again(keys: QueueKeys, jobs: Sequence[tuple[JobId, int]]) -> Call[list[bool]]:
    """Tell the history again where jobs are, each with the version that it has now (0: it has no row)."""
    _check_bite(jobs)
    return Call("tell_again", keys.fixed(), (pack_for_script(jobs),), _read_truths)


def restore_prompt(keys: QueueKeys, prompts: Sequence[tuple[JobId, bytes]]) -> Call[list[bool]]:
    """Give jobs that wait or run their prompts back, as they were submitted."""
    _check_bite(prompts)
    return Call("restore_prompt", keys.fixed(), (pack_for_script(prompts),), _read_truths)


def _check_bite(items: Sequence[object]) -> None:
    if len(items) > limits.MAX_BITE:
        raise ValueError(f"{len(items)} in one call; at most {limits.MAX_BITE}")


def _read_truths(reply: Raw) -> list[bool]:
    return [bool(one) for one in reply]
