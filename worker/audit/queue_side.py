"""Read a partition in slices, so that no command blocks the server longer than a pull does. Knows no SQL."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any, TypeVar, cast

from redis.exceptions import ResponseError

from sluice.protocol import limits
from sluice.protocol.calls.audit import (
    AUDIT_SLICE_JOBS,
    JobRecords,
    LaneView,
    PartitionCounts,
    StrayEntry,
    Sums,
    audit_batches,
    audit_counts,
    audit_jobs,
    audit_lane,
    joined,
    repair_counters,
)
from sluice.protocol.calls.base import Call, read_number
from sluice.protocol.chains.chain import ChainKeys
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.keys import RETURNED, QueueKeys
from sluice.protocol.messages import BATCH_NAME
from sluice.protocol.redis.execution import run, run_commands, run_many
from sluice.protocol.wire import JobId, WireError
from sluice.worker.audit.findings import Finding, Kind
from sluice.worker.connection.clients import Client

Item = TypeVar("Item")

COUNT_TRIES = 5
"""Counts of many lanes, if jobs come or go during each. Then their sum is not known."""

_UNITS, _NONE = ("jobs", "tokens", "bytes"), (0, 0, 0)

SLICES_AT_ONCE = 16
"""Slices in one round trip. The server serves other clients between them."""

_LANE = re.compile(rf"(returned|[0-9]):[a-z0-9_-]{{1,{limits.MAX_TENANT_CHARS}}}")

SETTINGS_SLACK_MS = 10_000
"""Margin for a failover to another clock."""

READ_AT_ONCE = AUDIT_SLICE_JOBS * SLICES_AT_ONCE


def in_slices(items: Iterable[Item], size: int = READ_AT_ONCE) -> Iterator[list[Item]]:
    """Yield the items in lists of at most `size`."""
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


class QueueSide:
    """One partition. Changes as it notes the lanes and leases that it sees."""

    def __init__(self, client: Client, keys: QueueKeys) -> None:
        self.keys = keys
        self.lanes: set[str] = set()
        self.batches: set[str] = set()
        self.holders: dict[JobId, set[str]] = {}
        self._incarnations: set[str] = set()
        self.sums = Sums()
        self._slices: list[list[bytes]] = []
        """The lanes, if there were too many for one call at the last count."""

        self._client = client

    # ------------------------------------------------------------ jobs

    def job_ids(self) -> Iterator[JobId]:
        """Iterate over jobs with a row, possibly including concurrent changes, and note what else is on the way."""
        start = len(self.keys.prefix) + 1
        pattern = re.sub(r"([\\*?\[\]])", r"\\\1", self.keys.prefix) + ":*"
        for key in self._client.scan_iter(match=pattern, count=500):
            kind, _, rest = key[start:].decode(errors="replace").partition(":")
            if kind == "lane" and _LANE.fullmatch(rest):
                self.lanes.add(rest)
            elif kind == "batch" and BATCH_NAME.fullmatch(rest):
                self.batches.add(rest)
            elif kind == "held":
                self._incarnations.add(rest)
            elif kind == "job" and (job_id := self._job_id(rest.replace(":", "."))):
                yield job_id

    def referenced_jobs(self) -> Iterator[JobId]:
        """Iterate over jobs in leases and in the delayed, suspect and dead sets, with or without a row.

        Notes who holds the leases that it sees.
        """
        for incarnation in sorted(self._incarnations):
            for job_id in self._members(f"held:{incarnation}", self._client.hscan_iter):
                self.holders.setdefault(job_id, set()).add(incarnation)
                yield job_id
        for name in ("delayed", "suspects", "dead"):
            yield from self._members(name, self._client.zscan_iter)

    def _members(self, name: str, read: Callable[..., Iterator[tuple[bytes, object]]]) -> Iterator[JobId]:
        for member, _ in read(self.keys.key(name), count=READ_AT_ONCE):
            if job_id := self._job_id(member.decode(errors="replace")):
                yield job_id

    def _job_id(self, text: str) -> JobId | None:
        text = text if text[:1].isdigit() and text.count(".") == 2 else f"{self.keys.partition}.{text}"
        try:
            split_job_id(text)
        except WireError:
            return None
        return JobId(text)

    def records_of(self, job_ids: Iterable[JobId]) -> Iterator[JobRecords]:
        """Yield the state of each job, each read atomically."""
        for ids in in_slices(job_ids):
            calls = [audit_jobs(self.keys, job_slice, self.holders) for job_slice in in_slices(ids, AUDIT_SLICE_JOBS)]
            for answer in run_many(self._client, calls):
                if isinstance(answer, Exception):
                    raise answer
                yield from cast("list[JobRecords]", answer)

    def unknown(self, job_ids: list[JobId]) -> list[JobId]:
        """Return the jobs that have no row and are not blocked. Cheaper than `records_of`."""
        # First whether they are blocked: a released job has its row before it is no longer blocked.
        blocked = ("HMGET", ChainKeys(QueueKeys(self.keys.queue)).blocked, *job_ids)
        replies = run_commands(self._client, [blocked, *(("EXISTS", self.keys.job(job_id)) for job_id in job_ids)])
        if error := next((reply for reply in replies if isinstance(reply, Exception)), None):
            raise error
        values, *rows = cast("list[list[object]]", replies)
        known = zip(job_ids, values, rows, strict=True)
        return [job_id for job_id, value, is_there in known if value is None and not is_there]

    # ------------------------------------------------------------ waiting jobs

    def walk_waiting(self) -> Iterator[Finding]:
        """Check every entry of every lane against its job, and sum waiting jobs if nothing changes meanwhile."""
        named = (name.decode(errors="replace") for name in self._named_lanes())
        self.lanes |= {name for name in named if _LANE.fullmatch(name)}
        before, waiting = self.state(), defaultdict[str, Counter[str]](Counter)
        sums: list[tuple[str, str, int]] = []
        for lane in sorted(self.lanes):
            yield from self._walk_lane(lane, waiting, sums)
        for name in ("delayed", "suspects"):
            for records in self.records_of(self._members(name, self._client.zscan_iter)):
                waiting[split_job_id(records.id)[1]].update(jobs=1, tokens=records.cost, bytes=records.bytes)
        stated, counts = self._stated_tenants(), self.counts()
        is_still = counts.waiting_jobs is not None and counts.stamp == before.stamp
        there = {tenant: (total["jobs"], total["tokens"], total["bytes"]) for tenant, total in waiting.items()}
        self.sums = Sums(
            stamp=before.stamp if is_still else "",
            jobs=counts.waiting_jobs or 0,
            tokens=sum(tokens for _, tokens, _ in there.values()),
            bytes=sum(num_bytes for _, _, num_bytes in there.values()),
            lanes=tuple(sums),
            tenants=tuple(
                (tenant, *there.get(tenant, _NONE))
                for tenant in sorted({*stated, *there})
                if stated.get(tenant, _NONE) != there.get(tenant, _NONE)
            ),
        )
        if is_still:
            yield from self._wrong_sums(before)
            yield from self._wrong_tenants(stated)

    def _walk_lane(
        self, lane: str, waiting: Mapping[str, Counter[str]], sums: list[tuple[str, str, int]]
    ) -> Iterator[Finding]:
        before, tokens = self._depth(lane), 0
        for view in self._views(lane):
            tokens += view.tokens
            if view.jobs:
                total = waiting[lane.partition(":")[2]]
                total.update(jobs=view.jobs, tokens=view.job_tokens, bytes=view.job_bytes)
            yield from (self._entry_without_job(lane, stray) for stray in view.strays)
        stated = read_number([*before.split(), "0", "0"][1])
        if stated != tokens and self._is_as_walked(lane, before, tokens):
            sums.append((lane, before, tokens))
            yield _counter(self.keys, f"lane {lane} tokens", stated, tokens)

    def _is_as_walked(self, lane: str, depth: str, tokens: int) -> bool:
        """Return whether a second walk finds the same: jobs that came and went meanwhile may leave the same depth."""
        is_still = self._depth(lane) == depth and sum(view.tokens for view in self._views(lane)) == tokens
        return is_still and self._depth(lane) == depth

    def _views(self, lane: str) -> Iterator[LaneView]:
        view = run(self._client, audit_lane(self.keys, lane, None))
        while view.last is not None:
            yield view
            view = run(self._client, audit_lane(self.keys, lane, view.last))

    def _entry_without_job(self, lane: str, stray: StrayEntry) -> Finding:
        there = "unknown" if stray.state is None else f"{stray.state}, at entry {stray.job_entry or 'none'}"
        named = "no job" if stray.job is None else f"job {stray.job}, which is {there}"
        return Finding(
            kind=Kind.ENTRY_WITHOUT_JOB,
            subject=f"{lane} {stray.entry}",
            queue=f"the entry names {named}",
            partition=self.keys.partition,
            lane=lane,
            entry=stray.entry,
        )

    def _depth(self, lane: str) -> str:
        return (self._client.hget(self.keys.key("depth"), lane) or b"").decode(errors="replace")

    # ------------------------------------------------------------ counters

    def state(self) -> PartitionCounts:
        """Read the counters, and the stamp of what they count."""
        return run(self._client, audit_counts(self.keys, [], is_slice=True))

    def counts(self) -> PartitionCounts:
        """Read the counters together with what they count: lanes at one instant, or many of them in slices."""
        seen, self._slices = sorted(self.lanes), []
        if len(seen) <= limits.LANES_PER_COUNT:
            counts = run(self._client, audit_counts(self.keys, seen))
            if counts.has_all_lanes:
                return counts
        counts = self._counts_of_slices()
        for _ in range(1, COUNT_TRIES):
            if counts.has_all_lanes:
                break
            counts = self._counts_of_slices()
        return counts

    def _counts_of_slices(self) -> PartitionCounts:
        # Before the lanes are listed: one that comes or goes from now on changes the stamp.
        before = self.state()
        self._slices = list(in_slices(sorted(self._named_lanes()), limits.LANES_PER_COUNT))
        # One round trip each: a server runs pipelined calls with short arguments one after the other.
        slices = [run(self._client, audit_counts(self.keys, lanes, is_slice=True)) for lanes in self._slices]
        return joined([before, *slices])

    def _named_lanes(self) -> set[bytes]:
        """Return the lanes whose keys were seen, or that `depth` or a class names, which another program may write."""
        named = {lane.encode() for lane in self.lanes}
        named |= {name for name, _ in self._client.hscan_iter(self.keys.key("depth"), count=READ_AT_ONCE)}
        for name in (RETURNED, *range(limits.MAX_PRIORITY + 1)):
            key = self.keys.key("heads", str(name))
            with suppress(ResponseError):  # of another type
                tenants = [tenant for tenant, _ in self._client.zscan_iter(key, count=READ_AT_ONCE)]
                named |= {f"{name}:".encode() + tenant for tenant in tenants}
        return named

    def repairs_of_counters(self) -> Iterator[Call[list[str]]]:
        """Yield the calls that repair counters and lanes by the last walk, each of a slice."""
        lanes, sums, most = self._slices or [sorted(self.lanes)], self.sums, limits.LANES_PER_COUNT
        parts = zip_longest(lanes, in_slices(sums.lanes, most), in_slices(sums.tenants, most), fillvalue=())
        for some_lanes, of_lanes, of_tenants in parts:
            some_sums = replace(sums, lanes=tuple(of_lanes), tenants=tuple(of_tenants))
            yield repair_counters(self.keys, some_lanes, some_sums, is_slice=bool(self._slices))

    def lost_settings(self, pulled_ms: int) -> str | None:
        """Return how the settings show that Redis lost those of a worker that pulled at `pulled_ms`; None if not."""
        settings = self._client.hgetall(self.keys.key("config"))
        began = re.fullmatch(rb"c([0-9a-f]+):\d+", settings.pop(b"stamp", b""))
        if began is not None:
            began_ms = int(began[1], 16)
            return f"they began at {began_ms}" if pulled_ms < began_ms - SETTINGS_SLACK_MS else None
        no_settings = {limits.STARTING.encode(), limits.CAPACITY.encode()}
        has_any = any(name not in no_settings and not name.startswith(b"test_") for name in settings)
        return None if has_any else "there are none"

    def wrong_batches(self) -> Iterator[Finding]:
        """Yield findings on batches whose total is not the number of their ended and open jobs."""
        for batches in in_slices(sorted(self.batches), limits.SLICE_JOBS):
            for batch in run(self._client, audit_batches(self.keys, batches)):
                if batch.stated != batch.counted:
                    finding = _counter(self.keys, batch.batch, batch.stated, batch.counted)
                    yield replace(finding, kind=Kind.BATCH)

    def oldest_event(self) -> str | None:
        """Return the id of the oldest unrecorded event; None if all are recorded."""
        first: list[Any] = self._client.xrange(self.keys.outbox, "-", "+", 1)
        return first[0][0].decode() if first else None

    def wrong_counts(self, counts: PartitionCounts) -> Iterator[Finding]:
        """Yield findings on counters that differ from what they count, and on the sum of all states."""
        stated = counts.counters
        for name, there in (("waiting_jobs", counts.waiting_jobs), ("running_jobs", counts.running_jobs)):
            if there is not None and stated.get(name, 0) != there:
                yield _counter(self.keys, name, stated.get(name, 0), there)
        for lane in counts.wrong_lanes:
            jobs = read_number(lane.stated.partition(" ")[0])
            yield _counter(self.keys, f"lane {lane.lane} jobs", jobs, lane.entries)
        for lane in counts.unlisted_lanes:
            finding = _counter(self.keys, f"lane {lane}", 0, 1)
            yield replace(finding, kind=Kind.LANE_UNLISTED, queue="it has entries, and its class does not list it")
        names = ("done", "failed", "cancelled", "expired", "waiting_jobs", "running_jobs")
        total = sum(stated.get(name, 0) for name in names)
        if stated.get("submitted", 0) != total:
            finding = _counter(self.keys, "submitted", stated.get("submitted", 0), total)
            yield replace(
                finding, kind=Kind.EQUATION, queue=f"submitted {stated.get('submitted', 0)}, in states {total}"
            )

    def _wrong_sums(self, counts: PartitionCounts) -> Iterator[Finding]:
        stated = counts.counters
        for name, there in (("waiting_tokens", self.sums.tokens), ("waiting_bytes", self.sums.bytes)):
            if stated.get(name, 0) != there:
                yield _counter(self.keys, name, stated.get(name, 0), there)

    def _stated_tenants(self) -> dict[str, tuple[int, ...]]:
        """Read the numbers of tenants that have waiting jobs; none from another program's key."""
        key = self.keys.key("tenants")
        if self._client.type(key) != b"hash":
            return {}
        fields = dict(self._client.hscan_iter(key, count=READ_AT_ONCE))
        stated = {name.decode(errors="replace"): text.split()[:3] for name, text in fields.items()}
        numbers = {tenant: tuple(map(read_number, words)) for tenant, words in stated.items()}
        return {tenant: counts for tenant, counts in numbers.items() if any(counts)}

    def _wrong_tenants(self, stated: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
        for tenant, *real_counts in self.sums.tenants:
            for unit, count, real in zip(_UNITS, stated.get(tenant, _NONE), real_counts, strict=False):
                if count != real:
                    yield _counter(self.keys, f"tenant {tenant} {unit}", count, real)


def _counter(keys: QueueKeys, name: str, stated: int, there: int) -> Finding:
    return Finding(
        kind=Kind.COUNTER,
        subject=f"{keys.partition}: {name}",
        queue=f"says {stated}, there are {there}",
        partition=keys.partition,
        drift=stated - there,
    )
