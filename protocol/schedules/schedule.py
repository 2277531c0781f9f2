"""A schedule, and how the queue keeps it: its rule and its jobs apart, because the rule is read every second."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from secrets import token_hex
from typing import Any, Literal, get_args

from sluice.protocol import limits
from sluice.protocol.calls import FromNow, NewJob
from sluice.protocol.checks import is_text
from sluice.protocol.errors import InvalidJob, InvalidSchedule, InvalidSetting, WireError
from sluice.protocol.job_ids import check_tenant, job_id_of
from sluice.protocol.jobs import CheckedJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import UNREADABLE, WIRE_VERSION, Reading, open_message, packed
from sluice.protocol.schedules.rule import CronRule
from sluice.protocol.stored_jobs import read_job, stored_job
from sluice.protocol.wire import JobId

MAX_NAME_CHARS = 40
MAX_JOBS = 256
MAX_BYTES = limits.MAX_CALL_BYTES
"""All jobs of a run are submitted in one round trip."""

MAX_SCHEDULE_BYTES = 4096
ALL_MISSED = 100
"""Most missed times that the rule `all` runs, the newest."""

ON_TIME_S = 60
"""A time counts as missed if nobody has fired it for this long."""

Misfire = Literal["latest", "all", "skip"]
Overlap = Literal["allow", "skip"]
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}")
PAUSED, LAST_RUN, REVISION = "paused:", ":run", "revision"


@dataclass(frozen=True, slots=True)
class ScheduleKeys:
    """The keys of a queue's schedules, in its partition 0."""

    queue: QueueKeys

    @property
    def schedules(self) -> str:
        """Hash: schedule id -> its rule; `paused:` and the id, if it is paused; `revision` -> drawn at each change."""
        return self.queue.key("schedules")

    @property
    def jobs(self) -> str:
        """Hash: schedule id -> its jobs."""
        return self.queue.key("schedules", "jobs")

    @property
    def times(self) -> str:
        """Sorted set: schedule id -> last time that was fired or skipped; the id and `:run` -> last time with a run."""
        return self.queue.key("schedules", "times")


@dataclass(frozen=True, slots=True)
class Due:
    """What is due of a schedule."""

    runs_s: list[int]
    """The times to run, oldest first."""

    last_s: int
    """The newest time that is due, whether it runs or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule without its jobs.

    Raises:
        InvalidJob: a value is wrong.
        InvalidSetting: croniter is not installed.
    """

    name: str
    tenant: str = "default"
    cron: str
    zone: str = "UTC"
    misfire: Misfire = "latest"
    """What to do about times that nobody fired: run the newest, all (at most `ALL_MISSED`), or none."""

    overlap: Overlap = "allow"
    """`skip`: not while a job of the last run is waiting or running."""

    num_jobs: int = 1
    num_tokens: int = 0
    """Tokens that the jobs of a run may use: of prompts, estimated for text, and `max_tokens`."""

    created_s: int = 0
    """Unix time from which on it runs."""

    rule: CronRule = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_tenant(self.tenant)
        for name, value, allowed in (("misfire", self.misfire, Misfire), ("overlap", self.overlap, Overlap)):
            if value not in get_args(allowed):
                raise InvalidSchedule(f"{name} must be one of {', '.join(get_args(allowed))}, got {value!r:.100}")
        if not 1 <= self.num_jobs <= MAX_JOBS or min(self.num_tokens, self.created_s) < 0:
            raise InvalidSchedule(f"a schedule has 1 to {MAX_JOBS} jobs and a time since 1970, got {self.num_jobs!r}")
        object.__setattr__(self, "rule", CronRule(self.cron, self.zone))

    @property
    def id(self) -> str:
        """Tenant and name, which together are unique in a queue."""
        return schedule_id(self.tenant, self.name)

    def due(self, last_s: int, now_s: int) -> "Due | None":
        """Return the times after the last one up to now, as far as they must run; None if there are none."""
        most = ALL_MISSED if self.misfire == "all" else 1
        moments = self.rule.newest(_moment(max(last_s, self.created_s)), _moment(now_s), most)
        times_s = [int(moment.timestamp()) for moment in moments]
        if not times_s:
            return None
        is_missed = self.misfire == "skip" and now_s - times_s[-1] >= ON_TIME_S
        return Due([] if is_missed else times_s, times_s[-1])

    def next_s(self, last_s: int) -> int:
        """Return the first time after the last one."""
        return int(next(self.rule.times_after(_moment(max(last_s, self.created_s)))).timestamp())

    def next_runs(self, after: datetime, count: int) -> tuple[datetime, ...]:
        """Return the next times after a moment, in the zone of the rule."""
        return self.rule.next_runs(after, count)

    def job_ids(self, time_s: int) -> list[JobId]:
        """Return the ids of the jobs of one run, which are the same in each process."""
        return [run_job_id(self.tenant, self.name, time_s, index) for index in range(self.num_jobs)]


def check_name(name: object) -> None:
    """Check the name of a schedule.

    Raises:
        InvalidSchedule: it cannot be part of a job id.
    """
    if not is_text(name) or not _NAME.fullmatch(str(name)):
        raise InvalidSchedule(f"a schedule's name is 1 to {MAX_NAME_CHARS} letters, digits, _ and -, got {name!r:.100}")


def schedule_id(tenant: str, name: str) -> str:
    """Return the id of a schedule; neither part has a full stop."""
    return f"{tenant}.{name}"


def run_job_id(tenant: str, name: str, time_s: int, index: int) -> JobId:
    """Return the id of a job of a run. Always in partition 0, so that it does not change with their number."""
    return job_id_of(0, tenant, f"{name}-{time_s}" + (f"-{index}" if index else ""))


def new_revision() -> tuple[str, str]:
    """Return field and value that each change of `ScheduleKeys.schedules` writes, so that watches read it again."""
    return REVISION, token_hex(8)


def _moment(time_s: int) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)


# ---------------------------------------------------------------- as the queue keeps it


def pack_schedule(schedule: Schedule) -> bytes:
    """Encode a schedule, except its name and tenant, which are its id."""
    return packed([WIRE_VERSION, {name: getattr(schedule, name) for name in _KEPT}])


def read_size(data: bytes) -> tuple[int, int]:
    """Return the jobs and the tokens of a run, without the rule, whose check takes longer.

    Raises:
        WireError: the bytes are not a schedule.
    """
    values = _kept_values(data)
    with Reading("schedule"):
        return int(values["num_jobs"]), int(values["num_tokens"])


def read_schedule(id_: str, data: bytes) -> Schedule:
    """Decode a schedule.

    Raises:
        WireError: the bytes are not one.
        InvalidSetting: croniter is not installed.
    """
    tenant, _, name = id_.partition(".")
    values = _kept_values(data)
    try:
        return Schedule(name=name, tenant=tenant, **{part: values[part] for part in _KEPT})
    except InvalidSetting:
        raise
    except UNREADABLE as error:
        raise WireError(f"not a schedule: {error}") from error


_KEPT = ("cron", "zone", "misfire", "overlap", "num_jobs", "num_tokens", "created_s")


def _kept_values(data: bytes) -> dict[str, Any]:  # Any: msgpack
    values = open_message(data, "schedule", MAX_SCHEDULE_BYTES, at_least=2)[1]
    # Schedules that were added before tokens were counted lack them.
    return {"num_tokens": 0, **values} if isinstance(values, dict) else values


def pack_jobs(jobs: Sequence[CheckedJob]) -> bytes:
    """Encode the jobs of a schedule, as they are submitted at each run.

    Raises:
        InvalidJob: a job cannot be submitted more than once, or there are too many.
    """
    if not 1 <= len(jobs) <= MAX_JOBS:
        raise InvalidJob(f"a schedule has 1 to {MAX_JOBS} jobs, got {len(jobs)}")
    data = packed([WIRE_VERSION, [_stored(job) for job in jobs]])
    if len(data) > MAX_BYTES:
        raise InvalidJob(f"the jobs of a schedule take at most {MAX_BYTES} bytes, got {len(data)}")
    return data


def _stored(job: CheckedJob) -> dict[str, object]:
    template = job.template
    if template.job_id is not None or template.idempotency_key is not None:
        raise InvalidJob("a scheduled job has neither job_id nor idempotency_key: each run gets ids of its own")
    for name, moment in (("not_before", template.not_before_ms), ("deadline", template.deadline_ms)):
        if moment is not None and not isinstance(moment, FromNow):
            raise InvalidJob(f"{name} of a scheduled job must be a time after the run (a timedelta)")
    seed = None if template.seed is None else str(template.seed)
    return {**stored_job(job.new_job(1)), "seed": seed}


def read_jobs(data: bytes, schedule: Schedule, time_s: int) -> list[NewJob]:
    """Decode the jobs of a schedule for the run of one time.

    Raises:
        WireError: the bytes are not jobs.
    """
    jobs = open_message(data, "schedule's jobs", MAX_BYTES, at_least=2)[1]
    with Reading("schedule's jobs"):
        return [_new_job(stored, schedule, time_s, index) for index, stored in enumerate(jobs)]


def _new_job(stored: dict[str, Any], schedule: Schedule, time_s: int, index: int) -> NewJob:  # Any: msgpack
    job_id = run_job_id(schedule.tenant, schedule.name, time_s, index)
    return read_job(stored, job_id, int.from_bytes(blake2b(job_id.encode(), digest_size=8).digest()))
