"""A death is reported until Redis has heard of it."""

import pytest
from structlog.testing import capture_logs

from sluice.protocol.calls import Beat, beat
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.worker.log import get_log
from sluice.worker.processes import death_report
from sluice.worker.processes.death_report import DeathReports
from tests.integration.jobs import KEYS, wait_until
from tests.servers import RedisServer

DEAD = "f" * 32


class TestGivenARegisteredWorker:
    def test_when_redis_is_away_at_its_death_then_the_report_follows(self, durable_valkey: RedisServer) -> None:
        with durable_valkey.client() as client:
            run(client, beat(KEYS, Beat(incarnation=DEAD, held=(), processed_pull=0, expiry_ms=60_000)))
        durable_valkey.stop()
        with capture_logs() as lines:
            DeathReports(durable_valkey.url, [KEYS], get_log()).send(DEAD, was_ready=True)

            durable_valkey.start()
            wait_until(lambda: bool(lines), "the report has an outcome")

        assert [line["event"] for line in lines] == ["worker's death reported"]
        with durable_valkey.client() as client:
            assert client.hget(KEYS.key("worker", DEAD), "reported") == b"1"

    def test_when_redis_stays_away_then_a_warning_says_that_its_jobs_wait(
        self, durable_valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(death_report, "RETRY_FOR_S", 0.1)
        durable_valkey.stop()
        with capture_logs() as lines:
            DeathReports(durable_valkey.url, [KEYS], get_log()).send(DEAD, was_ready=True)

            wait_until(lambda: bool(lines), "the report has an outcome")

        (line,) = lines
        assert line["event"] == "worker's death not reported; its jobs wait until its heartbeat expires"
        assert (line["log_level"], line["worker_id"]) == ("warning", DEAD[:8])

    def test_when_one_partition_answers_late_then_success_is_logged_once(self, durable_valkey: RedisServer) -> None:
        second = QueueKeys(KEYS.queue, 1)
        with durable_valkey.client() as client, capture_logs() as lines:
            for keys in (KEYS, second):
                run(client, beat(keys, Beat(incarnation=DEAD, held=(), processed_pull=0, expiry_ms=60_000)))
            client.set(second.key("dead"), "of another program")
            DeathReports(durable_valkey.url, [KEYS, second], get_log()).send(DEAD, was_ready=True)
            wait_until(lambda: client.hget(KEYS.key("worker", DEAD), "reported"), "the first one has heard of it")
            assert lines == []

            client.delete(second.key("dead"))
            wait_until(lambda: bool(lines), "the report has an outcome")

        assert [line["event"] for line in lines] == ["worker's death reported"]


class TestGivenAWorkerThatWasNeverReady:
    def test_when_redis_is_away_at_its_death_then_nobody_is_warned(
        self, durable_valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(death_report, "RETRY_FOR_S", 0.1)
        durable_valkey.stop()
        with capture_logs() as lines:
            DeathReports(durable_valkey.url, [KEYS], get_log()).send(DEAD, was_ready=False)

            wait_until(lambda: bool(lines), "the report has an outcome")

        (line,) = lines
        assert line["event"] == "death not reported of a worker that was never ready"
        assert line["log_level"] == "debug"
