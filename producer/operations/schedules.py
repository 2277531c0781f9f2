"""Add, list, pause, resume, remove and fire schedules. No I/O."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import cast

from sluice.producer.errors import InvalidJob, ScheduleNotFound, TooManySchedules
from sluice.producer.operations.operation import Ask, Operation, driven
from sluice.producer.operations.queue import Queue
from sluice.protocol.bounds import SCHEDULES
from sluice.protocol.errors import WireError
from sluice.protocol.jobs import CheckedJob
from sluice.protocol.schedules.firing import (
    Look,
    ScheduleWatch,
    StoredSchedules,
    read_stored,
    reading,
)
from sluice.protocol.schedules.schedule import (
    LAST_RUN,
    PAUSED,
    Misfire,
    Overlap,
    Schedule,
    ScheduleKeys,
    new_revision,
    pack_jobs,
    pack_schedule,
    read_schedule,
    read_size,
    schedule_id,
)

NUM_NEXT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """A schedule as it is now."""

    name: str
    tenant: str
    cron: str
    zone: str
    misfire: Misfire
    overlap: Overlap
    num_jobs: int
    paused: bool
    last_run: datetime | None
    next_runs: tuple[datetime, ...]
    """The next times in its zone, from now on, as if it were not paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSchedule:
    """A schedule as the queue keeps it now."""

    id: str
    packed: bytes
    is_paused: bool
    last_run_s: int | None
    now_s: int

    @property
    def size(self) -> tuple[int, int]:
        """The jobs and the tokens of a run; none if it cannot be read, as it does not run."""
        try:
            return read_size(self.packed)
        except WireError:
            return 0, 0

    @property
    def tenant(self) -> str:
        """Its tenant."""
        return self.id.partition(".")[0]

    @property
    def name(self) -> str:
        """Its name."""
        return self.id.partition(".")[2]

    def view(self, num_next: int = NUM_NEXT) -> ScheduleView:
        """Read its rule and compute its next runs, which may take over 10 ms.

        Raises:
            ScheduleNotFound: it cannot be read.
            InvalidSetting: croniter is not installed.
        """
        try:
            schedule = read_schedule(self.id, self.packed)
        except WireError as error:
            raise ScheduleNotFound(self.name, self.tenant) from error
        names = ("name", "tenant", "cron", "zone", "misfire", "overlap", "num_jobs")
        last_run_s, zone = self.last_run_s, schedule.rule.zone_info
        return ScheduleView(
            **{name: getattr(schedule, name) for name in names},
            paused=self.is_paused,
            last_run=None if last_run_s is None else datetime.fromtimestamp(last_run_s, zone),
            next_runs=schedule.next_runs(datetime.fromtimestamp(self.now_s, UTC), num_next),
        )


def add(queue: Queue, schedule: Schedule, jobs: Sequence[CheckedJob]) -> Operation[KeptSchedule]:
    """Add a schedule, or replace the one of its name; times before this do not run.

    A schedule whose rule is the same already keeps the time from which on it runs, so that a program may add it at each
    start.

    Raises:
        InvalidJob: a job belongs to another tenant, or cannot be submitted more than once.
        TooManySchedules: the queue has `SCHEDULES` others.
    """
    packed, keys, id_ = packed_jobs(schedule, jobs), _keys(queue), schedule.id
    stored = yield from _read(queue)
    if id_ not in stored.rules and len(stored.rules) >= SCHEDULES.most:
        raise TooManySchedules(
            f"queue {queue.name!r} has {len(stored.rules)} schedules, and may have {SCHEDULES.most}: remove one first, "
            f"or give several jobs to one schedule"
        )
    num_tokens = sum(job.num_tokens for job in jobs)
    schedule = replace(schedule, num_jobs=len(jobs), num_tokens=num_tokens, created_s=_created_s(stored, schedule))
    rule = pack_schedule(schedule)
    # The rule is written last: a schedule without one is none.
    yield Ask((("HSET", keys.jobs, id_, packed), ("HSET", keys.schedules, id_, rule, *new_revision())))
    return _kept(stored, id_, rule)


def packed_jobs(schedule: Schedule, jobs: Sequence[CheckedJob]) -> bytes:
    """Return the jobs of a schedule, as the queue keeps them.

    Raises:
        InvalidJob: a job belongs to another tenant or cannot be submitted more than once, or there are too many.
    """
    if any(job.template.tenant != schedule.tenant for job in jobs):
        raise InvalidJob(f"every job of schedule {schedule.name} must be one of its tenant, {schedule.tenant!r}")
    return pack_jobs(jobs)


def _created_s(stored: StoredSchedules, schedule: Schedule) -> int:
    """Return the time from which on a schedule runs: now, or that of the same rule."""
    try:
        before = read_schedule(schedule.id, stored.rules.get(schedule.id, b""))
    except WireError:
        return stored.now_s
    is_same = (before.rule, before.misfire, before.overlap) == (schedule.rule, schedule.misfire, schedule.overlap)
    return before.created_s if is_same else stored.now_s


def find(queue: Queue, name: str, tenant: str) -> Operation[KeptSchedule]:
    """Return one schedule; no other is read.

    Raises:
        ScheduleNotFound: there is none of this name.
    """
    keys, id_ = _keys(queue), schedule_id(tenant, name)
    clock, packed, paused, last_run = yield Ask(
        (
            ("TIME",),
            ("HGET", keys.schedules, id_),
            ("HGET", keys.schedules, f"{PAUSED}{id_}"),
            ("ZSCORE", keys.times, f"{id_}{LAST_RUN}"),
        )
    )
    if not isinstance(packed, bytes) or id_.startswith(PAUSED):
        raise ScheduleNotFound(name, tenant)
    return KeptSchedule(
        id=id_,
        packed=packed,
        is_paused=paused is not None,
        last_run_s=None if last_run is None else int(float(cast("bytes", last_run))),
        now_s=int(cast("list[bytes]", clock)[0]),
    )


def find_all(queue: Queue, *, tenant: str | None = None) -> Operation[list[KeptSchedule]]:
    """Return the schedules of a queue (of one tenant), by tenant and name."""
    stored = yield from _read(queue)
    ids = sorted(id_ for id_ in stored.rules if tenant is None or id_.startswith(f"{tenant}."))
    return [_kept(stored, id_, stored.rules[id_]) for id_ in ids]


def views(found: Iterable[KeptSchedule], num_next: int) -> list[ScheduleView]:
    """Return the views of schedules. One that cannot be read is left out."""
    shown = list[ScheduleView]()
    for kept in found:
        with suppress(ScheduleNotFound):
            shown.append(kept.view(num_next))
    return shown


def pause(queue: Queue, name: str, tenant: str, *, is_paused: bool) -> Operation[None]:
    """Pause or resume a schedule. The times of a pause are not missed: they do not run.

    Raises:
        ScheduleNotFound: there is none of this name.
    """
    kept, keys = (yield from find(queue, name, tenant)), _keys(queue)
    paused = f"{PAUSED}{kept.id}"
    if is_paused:
        yield Ask((("HSET", keys.schedules, paused, 1, *new_revision()),))
    elif kept.is_paused:
        # First the time, so that nobody finds it resumed with the times of the pause due.
        resumed = ("HDEL", keys.schedules, paused), ("HSET", keys.schedules, *new_revision())
        yield Ask((("ZADD", keys.times, "GT", kept.now_s, kept.id), *resumed))


def remove(queue: Queue, name: str, tenant: str) -> Operation[None]:
    """Remove a schedule. Jobs that it has submitted continue.

    Raises:
        ScheduleNotFound: there is none of this name.
    """
    id_ = (yield from find(queue, name, tenant)).id
    keys = _keys(queue)
    yield Ask(
        (
            ("HDEL", keys.schedules, id_, f"{PAUSED}{id_}"),
            ("HSET", keys.schedules, *new_revision()),
            ("HDEL", keys.jobs, id_),
            ("ZREM", keys.times, id_, f"{id_}{LAST_RUN}"),
        )
    )


def fire(watch: ScheduleWatch) -> Operation[Look]:
    """Submit every run that is due, as each worker does once a second.

    Raises:
        QueueUnreachable: the server does not answer.
    """
    look = Look()
    yield from driven(watch.fire(look))
    return look


def watch_of(queue: Queue) -> ScheduleWatch:
    """Return a watch over the schedules of a queue."""
    return ScheduleWatch(queue.keys(0))


def _keys(queue: Queue) -> ScheduleKeys:
    return ScheduleKeys(queue.keys(0))


def _read(queue: Queue) -> Operation[StoredSchedules]:
    return read_stored((yield Ask(reading(_keys(queue)))))


def _kept(stored: StoredSchedules, id_: str, packed: bytes) -> KeptSchedule:
    return KeptSchedule(
        id=id_,
        packed=packed,
        is_paused=id_ in stored.paused,
        last_run_s=stored.last_run_s(id_),
        now_s=stored.now_s,
    )
