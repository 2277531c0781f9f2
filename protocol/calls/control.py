"""Change jobs and queues: cancel, requeue, delete, pause, purge and settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from sluice.protocol import limits
from sluice.protocol.calls.base import Call, Raw, check_slice, read_map, read_nothing, read_truths, read_words
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import pack_for_script
from sluice.protocol.wire import JobId

AGAIN = "again"
"""Answer for a job that a call has not processed."""


def cancel(keys: QueueKeys, job_ids: Sequence[JobId], *, reason: str | None = None) -> Call[list[str]]:
    """Cancel jobs: a waiting job ends at once, a running one is flagged for its worker.

    Returns for each job the state reached, `asked`, `unknown`, or `AGAIN`: call again for it, because the jobs before
    it have many choices. At most `SLICE_JOBS` jobs a call.
    """
    return Call("cancel", keys.fixed(), (reason or "", pack_for_script(check_slice(job_ids))), read_words)


def requeue(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[bool]]:
    """Requeue failed jobs of the dead set; they resume after their last token.

    Returns False for a job that has not failed, whose prompt has expired, or whose idempotency key a newer job has. At
    most `SLICE_JOBS` jobs a call.
    """
    return Call("requeue", keys.fixed(), (pack_for_script(check_slice(job_ids)),), read_truths)


def pause(keys: QueueKeys, *, is_paused: bool) -> Call[None]:
    """Pause or resume pulls and reclaims. Submits are not affected."""
    return Call("configure", keys.fixed(), ("paused", "1" if is_paused else ""), read_nothing)


def purge(keys: QueueKeys, *, tenant: str | None = None) -> Call[tuple[int, bool]]:
    """Cancel one slice of waiting jobs; returns (number of jobs, whether more are left)."""
    return Call("purge", keys.fixed(), (tenant or "",), lambda reply: (reply[0], bool(reply[1])))


def delete(keys: QueueKeys, job_ids: Sequence[JobId]) -> Call[list[bool]]:
    """Delete all keys of ended jobs; returns False for a job that has not ended. At most `SLICE_JOBS` jobs a call."""
    return Call("delete", keys.fixed(), (pack_for_script(check_slice(job_ids)),), read_truths)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Bounds and behaviour of a queue; None leaves a value unchanged.

    Raises:
        ValueError: a weight, a time to live or a count is out of its range.
    """

    max_waiting_jobs: int | None = None
    """Most waiting jobs of the queue. Each partition takes an equal part of this bound, and of the next four."""

    max_waiting_tokens: int | None = None
    max_waiting_bytes: int | None = None
    max_outbox_entries: int | None = None
    max_outbox_bytes: int | None = None
    tenant_share_percent: int | None = None
    """Part of what other tenants leave of the queue's bounds that one tenant may hold, once another has used the queue
    within a day. 100: no limit of its own.
    """

    durability: str | None = None
    """Default durability of submits: memory, aof, fsync or replica:N."""

    max_job_tokens: int | None = None
    """A job whose prompt + max_tokens exceeds this is refused at submit."""

    features: tuple[str, ...] | None = None
    partitions: int | None = None
    """Number of partitions that the workers serve; a client with another number is refused."""

    bytes_per_token: float | None = None
    mode: Literal["fifo", "fair", "deadline"] | None = None
    age_step_ms: int | None = None
    """0: strict priority classes, without ageing and without a share for lower classes."""

    weights: Mapping[str, float] | None = None
    """Tenant to weight, for mode fair: from `MIN_WEIGHT` to `MAX_WEIGHT`."""

    max_running: Mapping[str, int | None] | None = None
    """Tenant to the most jobs of it that run at once; None removes its limit. With 0, none of its jobs starts."""

    tokens_per_minute: Mapping[str, int | None] | None = None
    """Tenant to the tokens of prompts and outputs that its jobs may take a minute; None removes its limit."""

    channel_ttl_ms: int | None = None
    result_ttl_ms: int | None = None
    idempotency_ttl_ms: int | None = None
    keep_prompts: Literal["none", "hash", "full"] | None = None
    keep_results: bool | None = None
    export_batches: bool | None = None
    """Whether `worker callbacks` gets every completed batch, not only those with a URL."""

    max_failures: int | None = None
    """Retryable failures after which a job ends failed. Deaths of workers are counted separately."""

    reserve_tokens: int | None = None
    """Most output tokens of one choice that count towards the cost of a waiting job."""

    ms_per_token: float | None = None
    """Estimated time per token of cost, for mode deadline."""

    ttft_target_ms: float | None = None
    """Target of the time to first token of the queue's jobs: workers make their steps short enough, as with their
    own setting of this name, which it replaces. 0: none.
    """

    tpot_target_ms: float | None = None
    """Target of the time per further token, as `ttft_target_ms`."""

    dead_set_max: int | None = None
    test_clock_ms: int | None = None
    """For tests: stops the clock of the queue at this time."""

    test_clock_offset_ms: int | None = None
    """For tests: shifts the clock of the queue against that of the server."""

    def __post_init__(self) -> None:
        for name in ("channel_ttl_ms", "result_ttl_ms", "idempotency_ttl_ms", "max_failures", "partitions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if self.tenant_share_percent is not None and not 1 <= self.tenant_share_percent <= 100:
            raise ValueError(f"tenant_share_percent must be from 1 to 100, got {self.tenant_share_percent}")
        for name in ("ttft_target_ms", "tpot_target_ms"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be 0 (none) or more, got {value:g}")
        self._check_tenants()

    def _check_tenants(self) -> None:
        for tenant, weight in (self.weights or {}).items():
            _check_in(f"the weight of tenant {tenant}", weight, limits.MIN_WEIGHT, limits.MAX_WEIGHT)
        for name, of_tenants in self.tenant_limits().items():
            for tenant, most in of_tenants.items():
                _check_in(f"{name} of tenant {tenant}", most, TENANT_LIMITS[name], limits.MAX_TENANT_LIMIT)

    def tenant_limits(self) -> dict[str, Mapping[str, int | None]]:
        """Return the limits of tenants by the names of `TENANT_LIMITS`; None removes one."""
        return {"max_running": self.max_running or {}, "tokens_per_minute": self.tokens_per_minute or {}}


def _check_in(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        raise ValueError(f"{name} must be from {least:.15g} to {most:.15g}, got {value:.15g}")


TENANT_LIMITS = {"max_running": 0, "tokens_per_minute": 1}
"""The limits of a tenant, with their least values. Scripts store each as the setting `<limit>:<tenant>`."""


def configure(keys: QueueKeys, settings: QueueSettings) -> Call[None]:
    """Write settings of a queue. A worker writes max_job_tokens, features and partitions at start."""
    of_tenants = {"weights", *TENANT_LIMITS}
    pairs = [(field.name, getattr(settings, field.name)) for field in fields(settings) if field.name not in of_tenants]
    pairs += [(f"weight:{tenant}", weight) for tenant, weight in (settings.weights or {}).items()]
    flat = [text for name, value in pairs if value is not None for text in (name, _setting(value))]
    for name, limits_of in settings.tenant_limits().items():
        for tenant, most in limits_of.items():
            flat += [f"{name}:{tenant}", "" if most is None else str(most)]
    return Call("configure", keys.fixed(), tuple(flat), read_nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSettings:
    """The settings of a partition, as a worker has read them."""

    stamp: str = ""
    """Changes with each change of the settings; empty before the first read."""

    values: Mapping[str, str] = field(default_factory=dict[str, str])
    restored: tuple[str, ...] = ()
    """Names of settings that were lost, and were restored by this read."""

    page: str = ""
    """The page that has the next values; empty if these are all."""

    is_lost: bool = False
    """Whether Redis has lost settings since the earlier read."""


def restore_settings(
    keys: QueueKeys, known: KnownSettings, *, page: str = "", has_more: bool = False
) -> Call[KnownSettings]:
    """Read a page of the settings; if Redis has lost some since `known` was read, restore these.

    Args:
        keys: The partition.
        known: What was read before, at most `SETTINGS_PER_CALL` values a call.
        page: The page, from the reply with the one before it.
        has_more: Whether the others are sent by further calls. Nothing is read then.
    """
    if len(known.values) > limits.SETTINGS_PER_CALL:
        raise ValueError(f"{len(known.values)} settings in one call; at most {limits.SETTINGS_PER_CALL}")
    remembered = [text for pair in known.values.items() for text in pair]
    return Call("restore_settings", keys.fixed(), (known.stamp, page, int(has_more), *remembered), _read_settings)


def _read_settings(reply: Raw) -> KnownSettings:
    stamp, values, restored, page, is_lost = reply
    return KnownSettings(
        stamp=stamp.decode(),
        values=read_map(values),
        restored=tuple(read_map(restored)),
        page=page.decode(),
        is_lost=bool(is_lost),
    )


def _setting(value: Raw) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, (int, float, str)) else ",".join(value)
