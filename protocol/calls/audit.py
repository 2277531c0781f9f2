"""The calls of `worker audit`: inspections, which never write, and repairs. No I/O."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sluice.protocol import limits
from sluice.protocol.calls.base import Call, Raw, check_slice, read_number, read_text, read_truths
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import pack_for_script
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId

Item = TypeVar("Item")

AUDIT_SLICE_JOBS = 16
"""Most jobs in one call, which blocks the server."""

LANE_SLICE_ENTRIES = 64
"""Most lane entries in one call. An entry costs a quarter of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecords:
    """The records of one job in its row and in all other keys, at one instant."""

    id: JobId
    problem: str | None
    """Why there is no job: `unknown`, or `wrong type` or `not a job: <field>` if another program wrote its keys."""

    state: JobState | None
    version: int
    cost: int
    bytes: int
    epoch: int
    entry: str | None
    """The lane entry according to the row; likewise `lane`."""

    lane: str | None
    has_entry: bool
    """Whether the entry is on the lane and belongs to this job."""

    is_delayed: bool
    is_suspect: bool
    has_timer: bool
    """Whether a timer will make the job due."""

    owner: str | None
    """Owner of a running job, according to its row; None if it does not run."""

    lease_epoch: int
    is_held: bool
    """Whether the owner holds its lease."""

    is_owner_listed: bool
    """Whether the owner is listed as alive, or as dead with jobs that are not reclaimed yet."""

    has_payload: bool
    dead_ms: float | None
    """Time at which the job entered the dead set."""

    ended_ms: int | None
    submitted_ms: int | None
    is_in_batch: bool | None
    """Whether the batch lists the job as open; None without a batch."""

    has_open_channel: bool
    """Whether the job has ended, but a channel has tokens without an end."""

    strays: tuple[str, ...]
    """Incarnations that hold a lease of the job and do not own it."""

    seen_ms: int

    @property
    def num_places(self) -> int:
        """Number of places in which the job waits: exactly one for a queued job."""
        return self.has_entry + self.is_delayed + self.is_suspect


Holders = Mapping[JobId, Collection[str]]
"""For each job, the incarnations whose lists of leases were seen to have it."""


def _with_holders(job_ids: Sequence[JobId], holders: Holders) -> bytes:
    return pack_for_script([(job_id, sorted(holders.get(job_id, ()))) for job_id in job_ids])


def audit_jobs(keys: QueueKeys, job_ids: Sequence[JobId], holders: Holders) -> Call[list[JobRecords]]:
    """Inspect up to `AUDIT_SLICE_JOBS` jobs with all their records. Never writes."""

    def read(reply: Raw) -> list[JobRecords]:
        now, rows = reply
        return [_read_records(job_id, row, now) for job_id, row in zip(job_ids, rows, strict=True)]

    return Call("audit_jobs", keys.fixed(), (_with_holders(job_ids, holders),), read)


def _read_records(job_id: JobId, row: Raw, now: int) -> JobRecords:
    """Parse one job; the fields are in the order of `picture_of` in audit_jobs.lua."""
    return JobRecords(
        id=job_id,
        problem=read_text(row[0]),
        state=None if row[1] is None else JobState(row[1].decode()),
        version=row[2],
        cost=row[3],
        bytes=row[4],
        epoch=row[5],
        entry=read_text(row[6]),
        lane=read_text(row[7]),
        has_entry=bool(row[8]),
        is_delayed=bool(row[9]),
        is_suspect=bool(row[10]),
        has_timer=bool(row[11]),
        owner=read_text(row[12]),
        lease_epoch=row[13],
        is_held=bool(row[14]),
        is_owner_listed=bool(row[15]),
        has_payload=bool(row[16]),
        dead_ms=row[17],
        ended_ms=row[18],
        submitted_ms=row[19],
        is_in_batch=None if row[20] is None else bool(row[20]),
        has_open_channel=bool(row[21]),
        strays=tuple(one.decode(errors="replace") for one in row[22]),
        seen_ms=now,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayEntry:
    """A lane entry without a matching job."""

    entry: str
    job: str | None
    """The job that the entry names."""

    state: str | None
    """State of that job; None if it does not exist. Likewise `job_entry`."""

    job_entry: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneView:
    """A range of lane entries, compared with their jobs."""

    last: str | None
    """Id of the last entry read; None at the end of the lane."""

    tokens: int
    """Tokens of the entries; the next three are sums over their jobs."""

    jobs: int
    job_tokens: int
    job_bytes: int
    strays: tuple[StrayEntry, ...]


def audit_lane(keys: QueueKeys, lane: str, after: str | None) -> Call[LaneView]:
    """Read up to `LANE_SLICE_ENTRIES` entries of a lane (`<class>:<tenant>`), from the first or after one."""
    return Call("audit_lane", keys.fixed(), (lane, f"({after}" if after else "-", LANE_SLICE_ENTRIES), _read_lane)


def _read_lane(reply: Raw) -> LaneView:
    last, tokens, jobs, job_tokens, job_bytes, strays = reply
    return LaneView(
        last=read_text(last),
        tokens=tokens,
        jobs=jobs,
        job_tokens=job_tokens,
        job_bytes=job_bytes,
        strays=tuple(
            StrayEntry(
                entry=row[0].decode(), job=read_text(row[1]), state=read_text(row[2]), job_entry=read_text(row[3])
            )
            for row in strays
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneDepth:
    """A lane whose count in `depth` differs from its length."""

    lane: str
    stated: str
    entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCounts:
    """The counters of a partition, and what was counted in one call: all lanes if there are few, else a slice."""

    stamp: str
    """Two counts with the same stamp have counted the same jobs in the same places."""

    counters: Mapping[str, int]
    num_entries: int
    """Entries of the lanes that were counted. `has_all_lanes`: whether these were all."""

    has_all_lanes: bool
    num_off_lanes: int
    """Waiting jobs that are delayed, or suspects."""

    running_jobs: int
    wrong_lanes: tuple[LaneDepth, ...]
    unlisted_lanes: tuple[str, ...]
    """Lanes with entries that no pull would find."""

    outbox_entries: int
    outbox_first: str | None
    outbox_last: str
    """Id of the last event, which may be deleted."""

    @property
    def waiting_jobs(self) -> int | None:
        """Waiting jobs at the instant of the count; None if not all lanes were counted then."""
        return self.num_entries + self.num_off_lanes if self.has_all_lanes else None


def audit_counts(keys: QueueKeys, lanes: Sequence[str | bytes], *, is_slice: bool = False) -> Call[PartitionCounts]:
    """Compare counters with counts. Never writes.

    Args:
        keys: The partition.
        lanes: Up to `LANES_PER_COUNT` lanes whose keys exist.
        is_slice: Whether to count only these. Else all lanes are counted, unless there are too many.
    """
    return Call("audit_counts", keys.fixed(), (pack_for_script(_counted(lanes)), int(is_slice)), _read_counts)


def _counted(items: Sequence[Item]) -> Sequence[Item]:
    if len(items) > limits.LANES_PER_COUNT:
        raise ValueError(f"{len(items)} in one call; at most {limits.LANES_PER_COUNT}")
    return items


def _read_counts(reply: Raw) -> PartitionCounts:
    stamp, flat, num_entries, has_all, num_off_lanes, running, wrong_lanes, unlisted, outbox, first, last = reply
    counters = {
        name.decode(errors="replace"): read_number(value) for name, value in zip(flat[::2], flat[1::2], strict=True)
    }
    return PartitionCounts(
        stamp=stamp.decode(),
        counters=counters,
        num_entries=num_entries,
        has_all_lanes=bool(has_all),
        num_off_lanes=num_off_lanes,
        running_jobs=running,
        wrong_lanes=tuple(
            LaneDepth(lane=a.decode(errors="replace"), stated=b.decode(errors="replace"), entries=c)
            for a, b, c in wrong_lanes
        ),
        unlisted_lanes=tuple(lane.decode(errors="replace") for lane in unlisted),
        outbox_entries=outbox,
        outbox_first=read_text(first),
        outbox_last=last.decode(),
    )


def joined(counts: Sequence[PartitionCounts]) -> PartitionCounts:
    """Join the counts of slices that together have all lanes: they are of one instant if nothing changed meanwhile."""
    *_, last = counts
    return replace(
        last,
        num_entries=sum(one.num_entries for one in counts),
        has_all_lanes=all(one.stamp == last.stamp for one in counts),
        wrong_lanes=tuple(lane for one in counts for lane in one.wrong_lanes),
        unlisted_lanes=tuple(lane for one in counts for lane in one.unlisted_lanes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCount:
    """The number of a batch's jobs according to its hash, and that of jobs that have ended or are listed as open."""

    batch: str
    stated: int
    counted: int


def audit_batches(keys: QueueKeys, batches: Sequence[str]) -> Call[list[BatchCount]]:
    """Count the jobs of up to `SLICE_JOBS` batches, each at one instant. Never writes."""

    def read(reply: Raw) -> list[BatchCount]:
        return [BatchCount(batch=name, stated=row[0], counted=row[1]) for name, row in zip(batches, reply, strict=True)]

    return Call("audit_batches", keys.fixed(), (pack_for_script(batches),), read)


# ---------------------------------------------------------------- repairs


def repair_batches(keys: QueueKeys, batches: Sequence[str]) -> Call[list[bool]]:
    """Set the total of batches to their ended and open jobs, and complete those without open jobs."""
    check_slice(batches)
    return Call("repair_batches", keys.fixed(), (pack_for_script(batches),), read_truths)


def repair_jobs(keys: QueueKeys, job_ids: Sequence[JobId], holders: Holders) -> Call[list[str]]:
    """Repair leases and places of jobs so that they match the states; returns the action for each, '' if none."""
    check_slice(job_ids)
    args = (_with_holders(job_ids, holders),)
    return Call("repair_jobs", keys.fixed(), args, lambda reply: [item.decode() for item in reply])


def repair_lane(keys: QueueKeys, lane: str, entries: Sequence[str]) -> Call[list[bool]]:
    """Remove entries without a job from a lane (`<class>:<tenant>`)."""
    check_slice(entries)
    priority, _, tenant = lane.partition(":")
    return Call("repair_lane", keys.fixed(), (priority, tenant, pack_for_script(entries)), read_truths)


TenantWaiting = tuple[str, int, int, int]
"""(tenant, jobs, tokens, bytes)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Waiting jobs, with their tokens and bytes, in all, and of lanes and tenants whose numbers are wrong."""

    stamp: str = ""
    """Empty if jobs changed while the sums were computed, which invalidates them."""

    jobs: int = 0
    tokens: int = 0
    bytes: int = 0
    lanes: tuple[tuple[str, str, int], ...] = ()
    """(lane, text in `depth`, tokens)"""

    tenants: tuple[TenantWaiting, ...] = ()


def repair_counters(
    keys: QueueKeys, lanes: Sequence[str | bytes], sums: Sums, *, is_slice: bool = False
) -> Call[list[str]]:
    """Set counters and depths to the counted values; returns the changed names.

    `lanes` and `is_slice` as in `audit_counts`. Also of sums of lanes and tenants, a call takes a slice.
    """
    args = (
        pack_for_script(_counted(lanes)),
        int(is_slice),
        sums.stamp,
        sums.jobs,
        sums.tokens,
        sums.bytes,
        pack_for_script(_counted(sums.lanes)),
        pack_for_script(_counted(sums.tenants)),
    )
    return Call("repair_counters", keys.fixed(), args, lambda reply: [item.decode() for item in reply])


def republish_events(keys: QueueKeys, jobs: Sequence[tuple[JobId, int]]) -> Call[list[bool]]:
    """Republish the states of jobs to the history; each comes with the version of its row (0: no row)."""
    check_slice(jobs)
    return Call("republish_events", keys.fixed(), (pack_for_script(jobs),), read_truths)


def restore_prompt(keys: QueueKeys, prompts: Sequence[tuple[JobId, bytes]]) -> Call[list[bool]]:
    """Restore the submitted prompts of waiting or running jobs."""
    check_slice(prompts)
    return Call("restore_prompt", keys.fixed(), (pack_for_script(prompts),), read_truths)
