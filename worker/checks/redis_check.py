"""Check the Redis server: whether it is usable, what it keeps on disk, how fast it answers, and its clock."""

import time
from collections.abc import Iterator
from statistics import median

from sluice.protocol.redis.urls import redacted
from sluice.worker.checks.persistence import persistence_results
from sluice.worker.checks.result import CheckLevel, CheckResult
from sluice.worker.checks.site import Site
from sluice.worker.clock import monotonic_s
from sluice.worker.connection.clients import Client

MAX_LATENCY_MS = 5.0
"""A round trip longer than this delays tokens noticeably."""

MAX_SKEW_S = 1.0
"""Stored times are the server's. With more skew, they do not match this host's logs."""

PINGS = 20


def check_redis(site: Site) -> Iterator[CheckResult]:
    """Check the server.

    Raises:
        ConfigError: it refuses this user, or it could lose jobs.
        NotReady: it did not answer in time.
    """
    facts = site.reach_redis()
    yield CheckResult(what="redis", found=f"{facts.name} {facts.version} at {redacted(site.redis.url)}")
    limit = f"{facts.maxmemory / 2**20:.0f} MiB" if facts.maxmemory else "no limit"
    yield CheckResult(what="redis memory", found=f"{limit}, maxmemory-policy {facts.maxmemory_policy}")
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
    advice = "Tokens arrive this much later. Run the worker nearer to Redis."
    return _judged("redis latency", found, advice, is_well=median(trips_ms) <= MAX_LATENCY_MS)


def _clock(client: Client) -> CheckResult:
    seconds, microseconds = client.time()
    skew_s = time.time() - (seconds + microseconds / 1e6)
    advice = "Stored times are the server's. Synchronise the clocks (NTP)."
    return _judged("clock", f"{skew_s:+.3f} s from the server's", advice, is_well=abs(skew_s) <= MAX_SKEW_S)


def _judged(what: str, found: str, advice: str, *, is_well: bool) -> CheckResult:
    if is_well:
        return CheckResult(what=what, found=found)
    return CheckResult(what=what, found=found, level=CheckLevel.WARNING, advice=advice)
