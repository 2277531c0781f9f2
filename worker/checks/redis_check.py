"""Check the Redis server: whether it is usable, how fast it answers, its clock, and what it keeps on disk.

What it keeps on disk tells which levels of durability it supports, and whether the queue's own is one.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from redis.exceptions import ResponseError

from sluice.protocol.durability import Durability, Level, Persistence, persistence_of, read_durability
from sluice.protocol.errors import InvalidJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.urls import redacted
from sluice.worker.checks.site import CheckLevel, CheckResult, Site, warning
from sluice.worker.clock import monotonic_s
from sluice.worker.connection.clients import Client, shards_of

MAX_LATENCY_MS = 5.0
"""A round trip longer than this delays tokens noticeably."""

MAX_SKEW_S = 1.0
"""Stored times are the server's. With more skew, they do not match this host's logs."""

PINGS = 20
LEVELS = (
    *(Durability(level) for level in (Level.MEMORY, Level.AOF, Level.FSYNC)),
    *(Durability(Level.REPLICA, replicas) for replicas in (1, 2)),
)
"""Levels to check. More replicas are rare."""


def check_redis(site: Site) -> Iterator[CheckResult]:
    """Check the server.

    Raises:
        ConfigError: it refuses this user, or it could lose jobs.
        NotReady: it did not answer in time.
    """
    facts = site.reach_redis()
    yield CheckResult("redis", f"{facts.name} {facts.version} at {redacted(site.redis.url)}")
    limit = f"{facts.maxmemory / 2**20:.0f} MiB" if facts.maxmemory else "no limit"
    yield CheckResult("redis memory", f"{limit}, maxmemory-policy {facts.maxmemory_policy}")
    yield from site.ask_redis(lambda client: list(persistence_results(client)))
    yield site.ask_redis(_latency)
    yield site.ask_redis(_clock)


def _latency(client: Client) -> CheckResult:
    trips_ms: list[float] = []
    for _ in range(PINGS):
        began_s = monotonic_s()
        client.ping()
        trips_ms.append((monotonic_s() - began_s) * 1000)
    found = f"{median(trips_ms):.2f} ms a round trip (median of {PINGS}; slowest {max(trips_ms):.2f} ms)"
    if median(trips_ms) > MAX_LATENCY_MS:
        return warning("redis latency", found, "Tokens arrive this much later. Run the worker nearer to Redis.")
    return CheckResult("redis latency", found)


def _clock(client: Client) -> CheckResult:
    seconds, microseconds = client.time()
    skew_s = time.time() - (seconds + microseconds / 1e6)
    found = f"{skew_s:+.3f} s from the server's"
    if abs(skew_s) > MAX_SKEW_S:
        return warning("clock", found, "Stored times are the server's. Synchronise the clocks (NTP).")
    return CheckResult("clock", found)


def persistence_results(client: Client) -> Iterator[CheckResult]:
    """Report the persistence of each server, and the durability levels that all of them support.

    Raises:
        RedisError: a server does not answer.
    """
    shards = [_read_persistence(shard) for shard in shards_of(client)]
    for info, persistence in shards:
        yield _appending(persistence)
        yield _snapshot(info)
    servers = [persistence for _, persistence in shards]
    for level in LEVELS:
        what, objection = f"durability {level}", _objection(servers, level)
        if objection is None:
            yield CheckResult(what, "possible")
        else:
            yield CheckResult(what, f"not possible: {objection}", CheckLevel.NOTE)


def durability_results(client: Client, keys: QueueKeys) -> Iterator[CheckResult]:
    """Report whether the servers support the queue's own durability, if it has one.

    Raises:
        RedisError: a server does not answer.
    """
    given = client.hget(keys.key("config"), "durability")
    if given is None:
        return
    what, found = "queue durability", given.decode(errors="replace")
    try:
        servers = [_read_persistence(shard)[1] for shard in shards_of(client)]
        objection = _objection(servers, read_durability(found))
    except InvalidJob as error:
        objection = f"{error}. Set another: producer queues set --durability."
    if objection is None:
        yield CheckResult(what, found)
    else:
        yield warning(what, f"{found} is not possible, and submits are refused", objection)


def _read_persistence(client: Client) -> tuple[Mapping[str, Any], Persistence]:  # Any: redis-py's replies are untyped
    info: dict[str, Any] = client.info()
    try:
        config = {_text(name): _text(value) for name, value in client.config_get("*appendfsync*").items()}
    except ResponseError:
        config = None  # this user may not run CONFIG GET
    return info, persistence_of(info, config)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _appending(persistence: Persistence) -> CheckResult:
    what = "redis persistence"
    if not persistence.is_appending:
        advice = "A restart of the server loses all jobs. Set `appendonly yes` (and `appendfsync everysec`)."
        return warning(what, "no append-only file", advice)
    if persistence.is_append_failing:
        advice = "Jobs accepted now are lost if the server stops. Check its log and its disk space."
        return warning(what, "the append-only file cannot be written", advice)
    fsync = persistence.appendfsync or "unknown (this user may not run CONFIG GET)"
    waits = "has WAITAOF" if persistence.has_waitaof else "no WAITAOF"
    return CheckResult(what, f"append-only file is on, appendfsync {fsync}, {waits}")


def _snapshot(info: Mapping[str, Any]) -> CheckResult:
    age_s = time.time() - int(info.get("rdb_last_save_time", 0))
    found = f"last one {age_s:.0f} s ago, {info.get('rdb_changes_since_last_save', '?')} changes since"
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        return warning("redis snapshot", found, "The last snapshot failed. Check the server's log and its disk space.")
    return CheckResult("redis snapshot", found)


def _objection(servers: Sequence[Persistence], level: Durability) -> str | None:
    return next((objection for server in servers if (objection := server.objection(level)) is not None), None)
