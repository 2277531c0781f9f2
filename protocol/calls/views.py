"""Read the state of jobs and queues. Never writes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from sluice.protocol.calls.base import Call, Raw, check_slice, read_map, read_number, read_text, read_words
from sluice.protocol.keys import RETURNED, QueueKeys
from sluice.protocol.packing import pack_for_script
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The death of a worker, without deregistration, while it held the job."""

    incarnation: str
    mates: int
    """Number of other jobs that the worker held."""

    is_apart: bool
    """Whether the worker ran suspects in isolation."""

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
    """Reported by the worker with its first advance; likewise the next field. Shows latencies without a history."""

    first_token_ms: int | None = None
    output_tokens: int | None = None
    """Output tokens of all choices; set when the job has ended."""

    asked: JobState | None = None
    """The end state requested of a running job."""

    requeues: int = 0
    failures: int = 0
    """Number of retryable failures; `error` is that of the last one."""

    deaths: tuple[Death, ...] = ()
    """Deaths of the job's workers since it last made progress."""

    custom_id: str | None = None
    """Custom id of the bulk file's line that became the job; likewise the next field."""

    line: int | None = None
    expires_in_ms: int | None = None
    """Time until the job expires by its own deadline or time to live, by the server's clock; 0 or less: overdue.

    None if it has neither, or has ended. The deadline of its batch does not count.
    """

    limit: "TenantLimit | None" = None
    """The limit that a queued job waits for: its tenant is at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimit:
    """A partition's part of the limits of a tenant, and what is left of it."""

    tenant: str
    max_running: int | None
    """Most jobs that run at once; `running` of them do."""

    tokens_per_minute: int | None
    running: int | None
    tokens_left: int | None
    """Tokens that it may take now; below 0 after a job that took more than there were."""

    free_in_ms: int | None
    """Time until enough tokens have flowed back for the next job; None unless it waits for tokens."""

    is_at_limit: bool
    """Whether none of its jobs may start now."""


def status(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[JobView | None]]:
    """Read the state of jobs; None for an unknown or expired job. At most `SLICE_JOBS` jobs a call."""
    return Call("status", keys.fixed(), (pack_for_script(check_slice(job_ids)),), _read_status)


def _read_status(reply: Raw) -> list[JobView | None]:
    return [None if row is None else _checked_view(row) for row in reply]


def _checked_view(row: Raw) -> JobView:
    """Parse one job whose keys another program may have written.

    Raises:
        WireError: a value cannot be read.
    """
    try:
        return _read_view(row)
    except (ValueError, TypeError, AttributeError) as error:
        raise WireError(f"the queue's data of job {row[0]!r} cannot be read: {error}") from error


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
        limit=None if row[32] is None else _read_limit(row[32]),
    )


def _read_limit(row: Raw) -> TenantLimit:
    tenant, max_running, tokens_per_minute, running, tokens_left, free_in_ms = row
    return TenantLimit(
        tenant=tenant.decode(),
        max_running=max_running,
        tokens_per_minute=tokens_per_minute,
        running=running,
        tokens_left=tokens_left,
        free_in_ms=None if free_in_ms == -1 else free_in_ms,
        is_at_limit=free_in_ms is not None,
    )


def _read_death(listed: str) -> Death:
    incarnation, mates, apart, number = listed.split(",")
    return Death(incarnation=incarnation, mates=int(mates), is_apart=apart == "1", number=int(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionView:
    """The state of one partition, without its lanes and workers, whose number its cost does not depend on."""

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

    settings: Mapping[str, str]
    server_ms: int
    has_limits: bool = False
    """Whether tenants have limits (`list_limits`)."""

    num_workers: int = 0
    """Live incarnations."""

    models: tuple[str, ...] = ()
    """Models that the live incarnations serve."""

    delayed_jobs: int = 0
    """Waiting jobs that are not due yet; in `due_jobs`, due ones whose timer has not fired yet."""

    due_jobs: int = 0
    results_missed: int = 0
    """Large results that had been deleted before the recorder read them."""

    deadline_ms: int | None = None
    """The nearest deadline of a job or batch, or end of a time to live."""

    offers: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The texts of what engines of live incarnations offer (`Offer`), by model."""

    parents: Mapping[str, str] = field(default_factory=dict[str, str])
    """The adapters of live incarnations, which `models` has too, each with its model."""


Lane = tuple[str, str, int, int]
"""(class, tenant, jobs, tokens)"""

TenantWaiting = tuple[str, int, int, int]
"""(tenant, jobs, tokens, bytes)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView(PartitionView):
    """The state of one partition with its lanes and workers."""

    workers: Mapping[str, Mapping[str, str]]
    """Live incarnations and the fields of their heartbeats."""

    lanes: tuple[Lane, ...] = ()
    """(class, tenant, jobs, tokens) of the lanes with waiting entries: returned jobs, then by class, highest first."""

    tenants: tuple[TenantWaiting, ...] = ()
    """(tenant, jobs, tokens, bytes) of the tenants with waiting jobs, delayed ones included."""

    limits: tuple[TenantLimit, ...] = ()
    """The limits of tenants, by name."""

    tokens_per_s: float | None = None
    """Sum of the `tokens_per_s` that live workers report in `Beat.about`; None if no worker reports it."""


def inspect(keys: QueueKeys) -> Call[PartitionView]:
    """Read the state of a partition, without its lanes and workers."""
    return Call("inspect", keys.fixed(), (), _read_partition)


def _read_partition(reply: Raw) -> PartitionView:
    now, counters, settings, oldest, dead, suspects, outbox, num_workers, models, callbacks, *rest = reply
    delayed, due, deadline, offers, parents = rest
    numbers = {name: read_number(value) for name, value in read_map(counters).items()}
    by_name = read_map(settings)
    by_name.pop("stamp", None)  # not a setting: workers read it with `restore_settings`
    has_limits = by_name.pop("limited", None) is not None
    return PartitionView(
        waiting_jobs=numbers.pop("waiting_jobs", 0),
        waiting_tokens=numbers.pop("waiting_tokens", 0),
        waiting_bytes=numbers.pop("waiting_bytes", 0),
        running_jobs=numbers.pop("running_jobs", 0),
        worker_deaths=numbers.pop("worker_deaths", 0),
        results_missed=numbers.pop("results_missed", 0),
        oldest_ms=oldest,
        is_paused=by_name.get("paused") == "1",
        totals=numbers,
        dead=dead,
        suspects=suspects,
        outbox_entries=outbox,
        callback_entries=callbacks,
        num_workers=num_workers,
        models=tuple(sorted(read_words(models))),
        settings=by_name,
        has_limits=has_limits,
        server_ms=now,
        delayed_jobs=delayed,
        due_jobs=due,
        deadline_ms=deadline,
        offers=_read_offers(offers),
        parents=dict(word.split("\n", 1) for word in sorted(read_words(parents)) if "\n" in word),
    )


def _read_offers(listed: Raw) -> Mapping[str, tuple[str, ...]]:
    by_model: dict[str, list[str]] = {}
    for offer, model in (word.split("\n", 1) for word in sorted(read_words(listed)) if "\n" in word):
        by_model.setdefault(model, []).append(offer)
    return {model: tuple(offers) for model, offers in by_model.items()}


Workers = Mapping[str, Mapping[str, str]]
"""Living incarnations and the fields of their heartbeats."""


@dataclass(frozen=True, slots=True)
class WorkersPage:
    """A page of the living workers."""

    workers: Workers
    cursor: int
    """Where the next page begins; 0 after the last."""


def list_workers(keys: QueueKeys, cursor: int = 0, *, fields: Sequence[str] = ()) -> Call[WorkersPage]:
    """Read a page of the living workers: the named fields of their heartbeats, or all of them.

    A worker that lives while all pages are read is on at least one of them, perhaps on two.
    """
    return Call("list_workers", keys.fixed(), (cursor, *fields), _read_workers)


def _read_workers(reply: Raw) -> WorkersPage:
    cursor, listed = reply
    pairs = zip(listed[::2], listed[1::2], strict=True)
    return WorkersPage({name.decode(): read_map(about) for name, about in pairs}, int(cursor))


@dataclass(frozen=True, slots=True)
class LimitsPage:
    """A page of the limits of tenants."""

    limits: tuple[TenantLimit, ...]
    cursor: int
    """Where the next page begins; 0 after the last."""


def list_limits(keys: QueueKeys, cursor: int = 0) -> Call[LimitsPage]:
    """Read a page of the limits of tenants. A tenant is on at least one of the pages, perhaps on two."""
    return Call("list_limits", keys.fixed(), (cursor,), _read_limits)


def _read_limits(reply: Raw) -> LimitsPage:
    return LimitsPage(tuple(map(_read_limit, reply[1])), int(reply[0]))


def _read_lanes(depth: Mapping[bytes, bytes]) -> Iterator[Lane]:
    """Read lanes with jobs; entries that cannot be read are left out."""
    for name, text in depth.items():
        kind, _, tenant = _text(name).partition(":")
        jobs, tokens = _counts(text, 2)
        if tenant and jobs:
            yield kind, tenant, jobs, tokens


def _read_tenants(held: Mapping[bytes, bytes]) -> Iterator[TenantWaiting]:
    """Read tenants with waiting jobs; entries that cannot be read are left out."""
    for name, text in held.items():
        jobs, tokens, num_bytes = _counts(text, 3)
        if jobs:
            yield _text(name), jobs, tokens, num_bytes


def _counts(text: bytes, num: int) -> list[int]:
    """Read the first `num` counts of a text; all are 0 if one is not valid."""
    words = text.split()[:num]
    is_sound = len(words) == num and all(map(bytes.isdigit, words))
    return list(map(int, words)) if is_sound else [0] * num


LISTS = ("depth", "weights", "tenants")
"""Hashes with a field for each lane or tenant, needed for a whole view."""


def whole_view(
    partition: PartitionView,
    workers: Workers,
    lists: Mapping[str, Mapping[bytes, bytes]] = MappingProxyType({}),
    limits: Mapping[str, TenantLimit] = MappingProxyType({}),
) -> QueueView:
    """Join the state of a partition with its workers, the contents of `LISTS` and limits, as far as they were read."""
    facts = {name: getattr(partition, name) for name in PartitionView.__dataclass_fields__}
    weights = {f"weight:{_text(tenant)}": _text(weight) for tenant, weight in lists.get("weights", {}).items()}
    facts["settings"] = {**partition.settings, **weights}
    return QueueView(
        **facts,
        workers=workers,
        lanes=tuple(sorted(_read_lanes(lists.get("depth", {})), key=_place_of)),
        tenants=tuple(sorted(_read_tenants(lists.get("tenants", {})))),
        limits=tuple(limits[tenant] for tenant in sorted(limits)),
        tokens_per_s=rate_of(workers),
    )


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _place_of(lane: Lane) -> tuple[bool, list[int], str]:
    return lane[0] != RETURNED, [-ord(char) for char in lane[0]], lane[1]


def rate_of(workers: Workers) -> float | None:
    """Sum up the output tokens a second that workers report; None if no worker reports it."""
    rates = [rate for about in workers.values() if (rate := _rate(about.get("tokens_per_s"))) is not None]
    return sum(rates) if rates else None


def _rate(text: str | None) -> float | None:
    """Parse a rate; None if it is not valid, since another program may have written it."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None
