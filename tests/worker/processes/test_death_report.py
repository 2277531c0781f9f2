"""A death is reported until Redis has heard of it."""

from structlog.testing import capture_logs

from sluice.producer.contract.calls import Beat, beat
from sluice.producer.contract.transport.execution import run
from sluice.worker.log import get_log
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
            DeathReports(durable_valkey.url, [KEYS], get_log()).send(DEAD)

            durable_valkey.start()
            wait_until(lambda: bool(lines), "the report has an outcome")

        assert [line["event"] for line in lines] == ["worker's death reported"]
        with durable_valkey.client() as client:
            assert client.hget(KEYS.key("worker", DEAD), "reported") == b"1"
