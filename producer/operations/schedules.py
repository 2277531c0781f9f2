"""Add, list, pause, resume, remove and fire schedules. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sluice.producer.errors import InvalidJob, ScheduleNotFound, TooManySchedules
from sluice.producer.operations.operation import Ask, Operation, driven
from sluice.producer.operations.queue import Queue
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
    MAX_SCHEDULES,
    PAUSED,
    Misfire,
    Overlap,
    Schedule,
    ScheduleKeys,
    new_revision,
    pack_jobs,
    pack_schedule,
    read_schedule,
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


def add(queue: Queue, schedule: Schedule, jobs: Sequence[CheckedJob]) -> Operation[ScheduleView]:
    """Add a schedule, or replace the one of its name; times before this do not run.

    A schedule whose rule is the same already keeps the time from which on it runs, so that a program may add it at each
    start.

    Raises:
        InvalidJob: a job belongs to another tenant, or cannot be submitted more than once.
        TooManySchedules: the queue has `MAX_SCHEDULES` others.
    """
    packed, keys, id_ = packed_jobs(schedule, jobs), _keys(queue), schedule.id
    stored = yield from _read(queue)
    if id_ not in stored.rules and len(stored.rules) >= MAX_SCHEDULES:
        raise TooManySchedules(
            f"queue {queue.name!r} has {len(stored.rules)} schedules, and may have {MAX_SCHEDULES}: remove one first, "
            f"or give several jobs to one schedule"
        )
    schedule = replace(schedule, num_jobs=len(jobs), created_s=_created_s(stored, schedule))
    # The rule is written last: a schedule without one is none.
    rule = ("HSET", keys.schedules, id_, pack_schedule(schedule), *new_revision())
    yield Ask((("HSET", keys.jobs, id_, packed), rule))
    return _view(schedule, stored)


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


def schedules(queue: Queue, *, tenant: str | None = None, num_next: int = 1) -> Operation[list[ScheduleView]]:
    """Return the schedules of a queue (of one tenant), by tenant and name. One that cannot be read is left out."""
    stored = yield from _read(queue)
    found = list[ScheduleView]()
    for id_, packed in sorted(stored.rules.items()):
        if tenant is None or id_.startswith(f"{tenant}."):
            try:
                found.append(_view(read_schedule(id_, packed), stored, num_next))
            except WireError:
                continue
    return found


def schedule(queue: Queue, name: str, tenant: str, num_next: int = NUM_NEXT) -> Operation[ScheduleView]:
    """Return one schedule.

    Raises:
        ScheduleNotFound: there is none of this name.
    """
    stored = yield from _read(queue)
    try:
        return _view(read_schedule(*_known(stored, name, tenant)), stored, num_next)
    except WireError as error:
        raise ScheduleNotFound(name, tenant) from error


def pause(queue: Queue, name: str, tenant: str, *, is_paused: bool) -> Operation[None]:
    """Pause or resume a schedule. The times of a pause are not missed: they do not run.

    Raises:
        ScheduleNotFound: there is none of this name.
    """
    stored, keys = (yield from _read(queue)), _keys(queue)
    id_, _ = _known(stored, name, tenant)
    if is_paused:
        yield Ask((("HSET", keys.schedules, f"{PAUSED}{id_}", 1, *new_revision()),))
    elif id_ in stored.paused:
        # First the time, so that nobody finds it resumed with the times of the pause due.
        resumed = ("HDEL", keys.schedules, f"{PAUSED}{id_}"), ("HSET", keys.schedules, *new_revision())
        yield Ask((("ZADD", keys.times, "GT", stored.now_s, id_), *resumed))


def remove(queue: Queue, name: str, tenant: str) -> Operation[None]:
    """Remove a schedule. Jobs that it has submitted continue.

    Raises:
        ScheduleNotFound: there is none of this name.
    """
    id_, _ = _known((yield from _read(queue)), name, tenant)
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


def _known(stored: StoredSchedules, name: str, tenant: str) -> tuple[str, bytes]:
    id_ = schedule_id(tenant, name)
    if id_ not in stored.rules:
        raise ScheduleNotFound(name, tenant)
    return id_, stored.rules[id_]


def _view(schedule: Schedule, stored: StoredSchedules, num_next: int = NUM_NEXT) -> ScheduleView:
    last_run_s, zone = stored.last_run_s(schedule.id), schedule.rule.zone_info
    names = ("name", "tenant", "cron", "zone", "misfire", "overlap", "num_jobs")
    return ScheduleView(
        **{name: getattr(schedule, name) for name in names},
        paused=schedule.id in stored.paused,
        last_run=None if last_run_s is None else datetime.fromtimestamp(last_run_s, zone),
        next_runs=schedule.next_runs(datetime.fromtimestamp(stored.now_s, UTC), num_next),
    )
