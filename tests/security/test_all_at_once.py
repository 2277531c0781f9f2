"""One key of five requests a minute does everything at once: another tenant's requests are answered as before."""

import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.end_to_end.processes import ROOT, worker_pool
from tests.gateway.batches.processes import kill_all, place_in
from tests.gateway.gateway_process import GatewayProcess, new_key
from tests.servers import redis_server

pytestmark = pytest.mark.slow

SCOPES = ("submit", "read", "control")
PAUSE_S = 0.02
"""Between two requests of the other tenant."""


@contextmanager
def attacked(gateway: GatewayProcess, key: str) -> Generator[None]:
    """Attack a gateway."""
    command = [sys.executable, "-P", "-m", "tests.security.attackers", gateway.url, key]
    environ = {"PYTHONPATH": str(ROOT), "PATH": ""}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"attacking\n"
            yield
        finally:
            kill_all(process)


def latencies_s(gateway: GatewayProcess, key: str, seconds: float) -> list[float]:
    """The times of a tenant's short completions and reads, one after another, sorted."""
    found = list[float]()
    body = {"prompt": "hello", "max_tokens": 2, "model": "null", "priority": 5}
    with gateway.http(key) as http:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            answers = (http.post("/v1/completions", json=body), http.get("/v1/models"))
            found.append(time.monotonic() - began_s)
            assert [answer.status_code for answer in answers] == [httpx.codes.OK] * 2, answers[0].text
            time.sleep(PAUSE_S)  # the pace of the requests
    return sorted(found)


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return values[int(len(values) * 0.99)]


@pytest.fixture
def keys(tmp_path: Path) -> Generator[tuple[GatewayProcess, str, str]]:
    """A gateway with a worker and `worker callbacks`, and the keys of an attacker and of another tenant."""
    with redis_server("valkey") as server, worker_pool(server.url, tmp_path) as pool:
        pool.start_all(1)
        place = place_in(tmp_path, server.url)
        low = new_key(place.database_url, "low", rpm=5, tpm=2000, scopes=SCOPES)
        other = new_key(place.database_url, "other", scopes=SCOPES)
        with place.callbacks(), place.gateway() as made:
            yield made, low, other


def test_when_it_attacks_for_seconds_then_another_tenant_is_served(keys: tuple[GatewayProcess, str, str]) -> None:
    gateway, low, other = keys
    before = psutil.Process(gateway.process.pid).memory_info().rss

    with attacked(gateway, low):
        found = latencies_s(gateway, other, 2)
    grown = psutil.Process(gateway.process.pid).memory_info().rss - before

    assert found[-1] < 10  # without bounds 25 s, or refused
    assert grown < 400 * 1024 * 1024


@pytest.mark.long
@pytest.mark.timeout(900)
def test_when_it_attacks_for_minutes_then_the_other_tenant_waits_at_most_twice_as_long(
    keys: tuple[GatewayProcess, str, str],
) -> None:
    gateway, low, other = keys
    before = latencies_s(gateway, other, 60)

    with attacked(gateway, low):
        during = latencies_s(gateway, other, 300)
    after = latencies_s(gateway, other, 60)

    # The host's own noise is in all three.
    assert p99(during) <= 2 * max(p99(before), p99(after))
