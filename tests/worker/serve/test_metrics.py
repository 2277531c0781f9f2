"""/metrics, /healthz, /readyz; and a port that is taken."""

import socket
import urllib.request
from collections.abc import Generator
from http.client import HTTPConnection

import pytest
from structlog.testing import capture_logs

from sluice.worker.config import MetricsConfig
from sluice.worker.iteration_feed import IterationFeed
from sluice.worker.log import get_log
from sluice.worker.serve.metrics import (
    Meters,
    MetricsServer,
    Readiness,
    SampledRates,
    Value,
    WorkerCollector,
)

VALUES: dict[str, Value] = {
    "places": 64,
    "places_used": 3,
    "engine_waiting": 1,
    "step_occupancy": 0.03125,
    "loop_busy": 0.5,
    "device_utilisation": None,
    "tokens_per_second": 120.0,
    "kv_tokens_total": 1000,
    "kv_tokens_used": 250,
    "preemptions": 2,
    "steps": 10,
    "prompt_tokens": 5,
    "cached_tokens": 1,
    "loaded_tokens": 4,
    "output_tokens": 7,
    "kernels_replaced": 2,
    "failed_steps": 6,
}


class Health:
    """What the probes return. Changes with the test."""

    sick: str | None = None
    unready: str | None = None


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def meters() -> Meters:
    return Meters()


def server_on(port: int, health: Health, meters: Meters) -> MetricsServer:
    readiness = Readiness(sick=lambda: health.sick, unready=lambda: health.unready)
    collector = WorkerCollector(lambda: VALUES, meters)
    return MetricsServer(MetricsConfig(port=port), collector, readiness, IterationFeed(lambda _: None), get_log())


@pytest.fixture
def server(health: Health, meters: Meters) -> Generator[MetricsServer]:
    server = server_on(0, health, meters)
    server.start()
    yield server
    server.stop()


def get(server: MetricsServer, path: str) -> tuple[int, str]:
    assert server.port is not None
    connection = HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


class TestGivenAServer:
    def test_when_scraped_then_all_is_there(self, server: MetricsServer, meters: Meters) -> None:
        meters.ended("done", ttft_s=0.02, e2e_s=1.2, gaps_ms=[3.0, 700.0])
        meters.num_refused_writes = 4

        status, text = get(server, "/metrics")

        assert status == 200
        for line in (
            "sluice_places 64.0",
            "sluice_places_used 3.0",
            "sluice_engine_waiting 1.0",
            "sluice_step_occupancy 0.03125",
            "sluice_loop_busy 0.5",
            "sluice_kv_tokens_used 250.0",
            "sluice_kernels_replaced 2.0",
            "sluice_preemptions_total 2.0",
            "sluice_refused_writes_total 4.0",
            "sluice_failed_steps_total 6.0",
            'sluice_jobs_ended_total{state="done"} 1.0',
            'sluice_jobs_ended_total{state="expired"} 0.0',
            'sluice_ttft_seconds_bucket{le="0.025"} 1.0',
            'sluice_itl_seconds_bucket{le="0.005"} 1.0',
            'sluice_itl_seconds_bucket{le="+Inf"} 2.0',
            "sluice_e2e_seconds_sum 1.2",
        ):
            assert line in text
        assert "sluice_queue_depth_jobs" not in text, "Redis did not say"
        assert "sluice_device_utilisation" not in text, "no driver told it"

    def test_when_probed_then_the_reason_for_a_no_is_returned(self, server: MetricsServer, health: Health) -> None:
        assert get(server, "/healthz") == (200, "ok\n")
        assert get(server, "/readyz") == (200, "ok\n")

        health.sick, health.unready = "hung", "draining"

        assert get(server, "/healthz") == (503, "hung\n")
        assert get(server, "/readyz") == (503, "draining\n")
        assert get(server, "/else")[0] == 404


class TestGivenARequestOfItsIterations:
    """It comes from a loopback address. Names of jobs have their tenants."""

    @staticmethod
    def status_of(server: MetricsServer, headers: list[tuple[str, str]]) -> int:
        assert server.port is not None
        connection = HTTPConnection("127.0.0.1", server.port, timeout=5)
        try:
            connection.putrequest("GET", "/iterations", skip_host=True)
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders()
            return connection.getresponse().status
        finally:
            connection.close()

    @pytest.mark.parametrize(
        "host", ["127.0.0.1", "127.0.0.1:9400", "LocalHost:9400", "[::1]:9400", "[::1]", "127.1.2.3"]
    )
    def test_when_its_host_is_a_loopback_name_then_it_is_answered(self, server: MetricsServer, host: str) -> None:
        assert self.status_of(server, [("Host", host)]) == 200

    @pytest.mark.parametrize(
        "name", ["X-Forwarded-For", "x-forwarded-for", "Forwarded", "Via", "X-Forwarded-Host", "X-Real-IP"]
    )
    def test_when_a_proxy_passed_it_on_then_it_is_refused(self, server: MetricsServer, name: str) -> None:
        assert self.status_of(server, [("Host", "localhost"), (name, "203.0.113.7")]) == 404

    @pytest.mark.parametrize(
        "host",
        ["evil.example:9400", "localhost.evil.example", "10.0.0.1", "", "[", "127.0.0.1@evil.example", "2130706433"],
    )
    def test_when_its_host_is_another_one_then_it_is_refused(self, server: MetricsServer, host: str) -> None:
        assert self.status_of(server, [("Host", host)]) == 404

    def test_when_it_has_no_host_or_two_then_it_is_refused(self, server: MetricsServer) -> None:
        assert self.status_of(server, []) == 404
        assert self.status_of(server, [("Host", "localhost"), ("Host", "evil.example")]) == 404


class TestGivenAWorkerThatWasScraped:
    """The server closed the connection, so the port is in TIME_WAIT."""

    def test_when_it_starts_again_then_it_has_the_same_port(self, health: Health, meters: Meters) -> None:
        first = server_on(0, health, meters)
        first.start()
        assert first.port is not None
        port = first.port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
            assert answer.status == 200
        first.stop()

        second, third = server_on(port, health, meters), server_on(port, health, meters)
        second.start()
        third.start()

        try:
            assert second.port == port
            assert third.port not in (None, port), "another one listens there"
        finally:
            second.stop()
            third.stop()


class TestGivenATakenPort:
    def test_when_a_second_worker_starts_then_it_takes_the_next(self, health: Health, meters: Meters) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            server = server_on(port, health, meters)
            with capture_logs() as lines:
                server.start()
            try:
                assert server.port is not None
                assert server.port > port
                assert [(line["asked_port"], line["port"]) for line in lines if line["log_level"] == "warning"] == [
                    (port, server.port)
                ]
            finally:
                server.stop()

    def test_when_no_port_is_free_then_it_goes_on_without(self, health: Health, meters: Meters) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 65535))
            taken.listen()
            server = server_on(65535, health, meters)
            with capture_logs() as lines:
                server.start()

            assert server.port is None
            assert lines[0]["event"] == "metrics not served"
            server.stop()


class TestGivenRates:
    def test_when_sampled_then_they_are_of_the_time_between(self) -> None:
        now = [0.0]
        rates = SampledRates(lambda: now[0])

        now[0] = 2.0
        rates.sample(tokens=100, steps=10, rows=30, busy_s=1.0)
        assert (rates.tokens_per_s, rates.rows_per_step, rates.loop_busy) == (50.0, 3.0, 0.5)
        now[0] = 3.0
        rates.sample(tokens=140, steps=20, rows=70, busy_s=1.5)
        assert (rates.tokens_per_s, rates.rows_per_step, rates.loop_busy) == (40.0, 4.0, 0.5)
        now[0] = 4.0
        rates.sample(tokens=140, steps=20, rows=70, busy_s=1.5)
        assert (rates.tokens_per_s, rates.rows_per_step, rates.loop_busy) == (0.0, 0.0, 0.0)
