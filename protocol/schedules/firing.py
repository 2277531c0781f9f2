"""Fire the due times of a queue's schedules. No I/O: a generator yields the commands of a round trip, and gets replies.

Any number of processes may do this at once, and each may die at any step:

1. The rules and the last fired times are read, unless the last look has read the same and nothing is due since.
2. The jobs of a due time are submitted in one round trip, under ids that follow from schedule and time. A second submit
   is answered that they are duplicates.
3. The last time moves forward (`ZADD GT`), never back. If it does not, because the process has died, the next look
   finds the same time due, and submits the same ids.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from sluice.protocol import limits
from sluice.protocol.calls import PASSING, Refused, submit
from sluice.protocol.errors import InvalidJob, InvalidSetting, WireError
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import Command, Reply, command_of
from sluice.protocol.rows import read_state, state_command
from sluice.protocol.schedules.schedule import (
    LAST_RUN,
    PAUSED,
    REVISION,
    Schedule,
    ScheduleKeys,
    read_jobs,
    read_schedule,
)
from sluice.protocol.wire import JobId

FIRE_EVERY_S = 1.0
"""Time between two looks."""

READ_EVERY_S = 10
"""Longest time between two reads of the rules, if another program has changed them, or a failover has lost changes."""

Steps: TypeAlias = Generator[tuple[Command, ...], Sequence[Reply], None]


@dataclass(frozen=True, slots=True)
class Fired:
    """One run that was submitted, here or by another process at the same moment."""

    schedule: Schedule
    time_s: int
    job_ids: Sequence[JobId]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a schedule, or one of its times, was not run."""

    schedule_id: str
    message: str


@dataclass(slots=True, eq=False)
class Look:
    """What one look at the schedules did. Changes during the look."""

    fired: list[Fired] = field(default_factory=list[Fired])
    problems: list[Problem] = field(default_factory=list[Problem])


@dataclass(frozen=True, slots=True)
class _Known:
    """A rule, and when it is due next; both are only computed when what the queue keeps has changed."""

    packed: bytes
    last_s: int
    schedule: Schedule
    next_s: int


@dataclass(frozen=True, slots=True)
class StoredSchedules:
    """What the queue keeps of its schedules, without their jobs."""

    now_s: int
    rules: Mapping[str, bytes]
    paused: frozenset[str]
    times_s: Mapping[str, int]
    revision: bytes | None = None
    """Drawn at each change of rules and pauses; None before the first one."""

    def last_s(self, id_: str) -> int:
        """Return the last time that was fired or skipped; 0 if there is none."""
        return self.times_s.get(id_, 0)

    def last_run_s(self, id_: str) -> int | None:
        """Return the time of the last run."""
        return self.times_s.get(f"{id_}{LAST_RUN}")


def reading(keys: ScheduleKeys) -> tuple[Command, ...]:
    """Return the commands whose replies `read_stored` parses. All processes use the server's clock."""
    return (("TIME",), ("HGETALL", keys.schedules), ("ZRANGE", keys.times, 0, -1, "WITHSCORES"))


def read_stored(replies: Sequence[Reply]) -> StoredSchedules:
    """Parse the replies to `reading`.

    Raises:
        Exception: one of them is an error.
    """
    clock, entries, times = cast("Sequence[list[bytes]]", _sound(replies))
    names = [name.decode(errors="replace") for name in entries[::2]]
    rules = dict(zip(names, entries[1::2], strict=True))
    paused = frozenset(name.removeprefix(PAUSED) for name in names if name.startswith(PAUSED))
    revision = rules.pop(REVISION, None)
    known = {id_: rule for id_, rule in rules.items() if not id_.startswith(PAUSED)}
    times_s = {name.decode(errors="replace"): int(float(at)) for name, at in zip(times[::2], times[1::2], strict=True)}
    return StoredSchedules(int(clock[0]), known, paused, times_s, revision)


def _sound(replies: Sequence[Reply]) -> Sequence[Reply]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


@dataclass(frozen=True, slots=True)
class _Read:
    """What the last read of all rules and times found."""

    revision: bytes | None
    at_s: int
    next_s: float
    """When the first schedule is due that is not paused. Times only move forward, so none is due before."""

    problems: tuple[Problem, ...]
    """Those of rules that cannot be read."""

    def holds(self, revision: object, now_s: int) -> bool:
        """Return whether there is nothing to do, and nothing else to read, by the server's clock."""
        is_recent = self.at_s <= now_s < self.at_s + READ_EVERY_S
        return is_recent and revision == self.revision and now_s < self.next_s


@dataclass(slots=True, eq=False)
class ScheduleWatch:
    """One process's look at the schedules of a queue. Changes with each look."""

    queue: QueueKeys
    """Partition 0 of the queue."""

    _known: dict[str, _Known] = field(default_factory=dict[str, _Known], init=False)
    _read: _Read | None = field(default=None, init=False)

    def fire(self, look: Look) -> Steps:
        """Submit every run that is due, and note it in `look`.

        Raises:
            Exception: a reply that is an error, of the rules and times.
        """
        keys = ScheduleKeys(self.queue)
        clock, revision = _sound((yield (("TIME",), ("HGET", keys.schedules, REVISION))))
        if self._read is not None and self._read.holds(revision, int(cast("list[bytes]", clock)[0])):
            look.problems += self._read.problems
            return
        stored = read_stored((yield reading(keys)))
        due = self._all_due(stored, look)
        for schedule in due:
            try:
                yield from _fire(keys, schedule, stored, look)
            except (WireError, InvalidSetting, InvalidJob, ValueError) as error:
                look.problems.append(Problem(schedule.id, str(error)))

    def _all_due(self, stored: StoredSchedules, look: Look) -> list[Schedule]:
        """Return the schedules that are due, and note what was read."""
        self._known = {id_: known for id_, known in self._known.items() if id_ in stored.rules}
        due = list[Schedule]()
        going = stored.rules.keys() - stored.paused
        for id_ in going:
            try:
                schedule = self._due(id_, stored)
            except (WireError, InvalidSetting, InvalidJob, ValueError) as error:
                look.problems.append(Problem(id_, str(error)))
                self._known.pop(id_, None)
            else:
                due += [] if schedule is None else [schedule]
        next_s = min((known.next_s for id_, known in self._known.items() if id_ in going), default=float("inf"))
        self._read = _Read(stored.revision, stored.now_s, next_s, tuple(look.problems))
        return due

    def _due(self, id_: str, stored: StoredSchedules) -> Schedule | None:
        """Return a schedule if it is due."""
        packed, last_s, known = stored.rules[id_], stored.last_s(id_), self._known.get(id_)
        if known is None or (known.packed, known.last_s) != (packed, last_s):
            schedule = read_schedule(id_, packed)
            known = self._known[id_] = _Known(packed, last_s, schedule, schedule.next_s(last_s))
        return known.schedule if known.next_s <= stored.now_s else None


def _fire(keys: ScheduleKeys, schedule: Schedule, stored: StoredSchedules, look: Look) -> Steps:
    due = schedule.due(stored.last_s(schedule.id), stored.now_s)
    if due is None:
        return
    last_run_s = stored.last_run_s(schedule.id)
    for time_s in due.runs_s:
        if (yield from _is_going(keys, schedule, last_run_s)):
            continue
        refusal = yield from _submit(keys, schedule, time_s)
        if refusal is not None and refusal.is_passing:
            look.problems.append(Problem(schedule.id, refusal.message))
            return
        if refusal is not None:
            which = "a job of the run" if refusal.others_run else "the run"
            look.problems.append(Problem(schedule.id, f"{which} of {time_s} was refused: {refusal.message}"))
        if refusal is None or refusal.others_run:
            look.fired.append(Fired(schedule, time_s, schedule.job_ids(time_s)))
            last_run_s = time_s
            yield (("ZADD", keys.times, "GT", time_s, schedule.id, time_s, f"{schedule.id}{LAST_RUN}"),)
    yield (("ZADD", keys.times, "GT", due.last_s, schedule.id),)


def _is_going(
    keys: ScheduleKeys, schedule: Schedule, last_run_s: int | None
) -> Generator[tuple[Command, ...], Sequence[Reply], bool]:
    """Return whether a job of the last run has not ended, if the schedule leaves out runs meanwhile."""
    if schedule.overlap == "allow" or last_run_s is None:
        return False
    replies = yield tuple(state_command(keys.queue.job(job_id)) for job_id in schedule.job_ids(last_run_s))
    return any(state is not None and not state.is_terminal for state in map(read_state, replies))


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a job of a run was not accepted."""

    message: str
    is_passing: bool = False
    """Whether a later try may help."""

    others_run: bool = False
    """Whether the queue has accepted others of the run."""


def _submit(
    keys: ScheduleKeys, schedule: Schedule, time_s: int
) -> Generator[tuple[Command, ...], Sequence[Reply], _Refusal | None]:
    """Submit the jobs of one run; return why one was refused."""
    [packed] = yield (("HGET", keys.jobs, schedule.id),)
    if not isinstance(packed, bytes):
        return _Refusal(f"its jobs cannot be read: {packed or 'they are gone'}", is_passing=True)
    jobs, most = read_jobs(packed, schedule, time_s), limits.MAX_JOBS_PER_CALL
    calls = [submit(keys.queue, jobs[at : at + most]) for at in range(0, len(jobs), most)]
    replies = yield tuple(map(command_of, calls))
    for reply in replies:
        if isinstance(reply, Exception):
            return _Refusal(str(reply), is_passing=True)
    answers = [answer for call, reply in zip(calls, replies, strict=True) for answer in call.parse(reply)]
    # A conflict is a run that another process has submitted with the jobs from before a change of the schedule.
    refusals = [answer for answer in answers if isinstance(answer, Refused)]
    passing = [refused for refused in refusals if refused.reason in PASSING]
    for refused in passing or refusals:
        return _Refusal(refused.message, is_passing=bool(passing), others_run=len(refusals) < len(answers))
    return None
