"""Read the state of jobs and queues. Never writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.producer.contract.calls.base import Call, Raw, read_map, read_number, read_text
from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.packing import pack_for_script
from sluice.producer.contract.states import JobState
from sluice.producer.contract.wire import JobId, WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The death of a worker, without deregistration, while it held the job."""

    incarnation: str
    mates: int
    """Number of other jobs that it held."""

    is_apart: bool
    """Whether it ran suspects in isolation."""

    number: int
    """Sequence number among all deaths in the partition; gaps are deaths without this job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The state of one job in the queue."""

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
    """Jobs ahead on its lane, an upper bound; None unless queued. Likewise `ahead_tokens`."""

    ahead_tokens: int | None
    has_result: bool
    first_scheduled_ms: int | None = None
    """Reported by the worker with its first advance; likewise the next field. Gives latencies without a history."""

    first_token_ms: int | None = None
    output_tokens: int | None = None
    """Of all choices; set when the job has ended."""

    asked: JobState | None = None
    """The end state requested of a running job."""

    requeues: int = 0
    failures: int = 0
    """Number of retryable failures; `error` is that of the last one."""

    deaths: tuple[Death, ...] = ()
    """Deaths of its workers since it last made progress."""

    custom_id: str | None = None
    """Of the line of a bulk file that it is from; likewise the next field."""

    line: int | None = None
    expires_in_ms: int | None = None
    """Time until it expires by its own deadline or time to live, by the server's clock; 0 or less if it is overdue.

    None if it has neither, or has ended. The deadline of its batch does not count.
    """


def status(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[JobView | None]]:
    """Read the state of jobs; None for an unknown or expired job. At most `MAX_JOBS_PER_CALL` jobs a call."""
    return Call("status", keys.fixed(), (pack_for_script(job_ids),), _read_status)


def _read_status(reply: Raw) -> list[JobView | None]:
    return [None if row is None else _checked_view(row) for row in reply]


def _checked_view(row: Raw) -> JobView:
    """Parse one job whose keys another program may have written.

    Raises:
        WireError: a value is not one of this program.
    """
    try:
        return _read_view(row)
    except (ValueError, TypeError, AttributeError) as error:
        raise WireError(f"what the queue holds of job {row[0]!r} cannot be read: {error}") from error


def _read_view(row: Raw) -> JobView:
    """Parse one job; the fields are in the order of `look` in status.lua."""
    asked = read_text(row[24])
    return JobView(
        id=JobId(row[0].decode()),
        state=JobState(row[1].decode()),
        version=row[2],
        priority=row[3],
        submitted_ms=row[4],
        started_ms=row[5],
        ended_ms=row[6],
        attempt=row[7],
        owner=read_text(row[8]),
        prompt_tokens=row[9],
        cost=row[10],
        choices=row[11],
        published=tuple(row[12]),
        error=read_text(row[13]),
        error_code=read_text(row[14]),
        finish_reason=read_text(row[15]),
        batch=read_text(row[16]),
        spec=row[17],
        seed=int(row[18]),
        ahead_jobs=row[19],
        ahead_tokens=row[20],
        has_result=bool(row[21]),
        first_scheduled_ms=row[22],
        first_token_ms=row[23],
        asked=None if asked is None else JobState(asked),
        requeues=row[25],
        output_tokens=row[26],
        failures=row[27],
        deaths=tuple(map(_read_death, (read_text(row[28]) or "").split(";")[:-1])),
        custom_id=read_text(row[29]),
        line=row[30],
        expires_in_ms=row[31],
    )


def _read_death(listed: str) -> Death:
    incarnation, mates, apart, number = listed.split(",")
    return Death(incarnation=incarnation, mates=int(mates), is_apart=apart == "1", number=int(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """The state of one partition."""

    waiting_jobs: int
    waiting_tokens: int
    waiting_bytes: int
    running_jobs: int
    worker_deaths: int
    """Number of heartbeats that expired without deregistration (slow workers included) and of workers that broke."""

    oldest_ms: int | None
    """Submit time of the oldest waiting job."""

    is_paused: bool
    totals: Mapping[str, int]
    """Jobs ever submitted and ended, by state."""

    dead: int
    suspects: int
    outbox_entries: int
    callback_entries: int
    """Entries that `worker callbacks` has not sent yet."""

    workers: Mapping[str, Mapping[str, str]]
    """Live incarnations and the fields of their heartbeats."""

    lanes: tuple[tuple[str, str, int, int], ...]
    """(class, tenant, jobs, tokens) of up to 100 lanes with waiting entries."""

    settings: Mapping[str, str]
    server_ms: int
    tokens_per_s: float | None
    """Sum of the `tokens_per_s` that live workers report in `Beat.about`; None if none reports it."""

    delayed_jobs: int = 0
    """Waiting jobs whose time has not come, and in `due_jobs` those whose timer has not fired yet."""

    due_jobs: int = 0
    deadline_ms: int | None = None
    """When the first job is too late: the nearest deadline of a job or batch, or end of a time to live."""


def inspect(keys: QueueKeys) -> Call[QueueView]:
    """Read the state of a partition."""
    return Call("inspect", keys.fixed(), (), _read_queue)


def _read_queue(reply: Raw) -> QueueView:
    now, counters, settings, oldest, dead, suspects, outbox, workers, lanes, callbacks, *timers = reply
    delayed, due, deadline = timers
    numbers = {name: read_number(value) for name, value in read_map(counters).items()}
    living = {name.decode(): read_map(about) for name, about in zip(workers[::2], workers[1::2], strict=True)}
    known = read_map(settings)
    known.pop("stamp", None)  # no setting: it is for workers, which read it with `restore_settings`
    return QueueView(
        waiting_jobs=numbers.pop("waiting_jobs", 0),
        waiting_tokens=numbers.pop("waiting_tokens", 0),
        waiting_bytes=numbers.pop("waiting_bytes", 0),
        running_jobs=numbers.pop("running_jobs", 0),
        worker_deaths=numbers.pop("worker_deaths", 0),
        oldest_ms=oldest,
        is_paused=known.get("paused") == "1",
        totals=numbers,
        dead=dead,
        suspects=suspects,
        outbox_entries=outbox,
        callback_entries=callbacks,
        workers=living,
        lanes=tuple((lane[0].decode(), lane[1].decode(errors="replace"), lane[2], lane[3]) for lane in lanes),
        settings=known,
        server_ms=now,
        tokens_per_s=_sum_of_rates(living),
        delayed_jobs=delayed,
        due_jobs=due,
        deadline_ms=deadline,
    )


def _sum_of_rates(workers: Mapping[str, Mapping[str, str]]) -> float | None:
    rates = [about["tokens_per_s"] for about in workers.values() if "tokens_per_s" in about]
    return sum(map(float, rates)) if rates else None
