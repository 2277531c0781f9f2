"""A key reads as much as it can, or sends what is refused: it is told to wait, and others are served."""

import json
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from sluice.gateway.openai.responses import ResponseInfo
from sluice.gateway.responses.store import ResponseStore, StoredResponse
from sluice.gateway.tables.database import Database
from sluice.history.database import open_database
from sluice.protocol.clock import wall_ms
from sluice.protocol.wire import JobId
from sluice.worker.recorder.migrate import migrate
from tests.gateway.gateway_process import GatewayProcess, gateway_process, new_key
from tests.servers import redis_server

pytestmark = pytest.mark.slow

READS_AT_ONCE = 20
NUM_ITEMS = 9_900


@dataclass(frozen=True)
class Limited:
    """A gateway without a worker whose keys may read 20 times at once, and then twice a second."""

    gateway: GatewayProcess
    database_url: str

    def key(self, tenant: str = "low") -> str:
        """A new key."""
        return new_key(self.database_url, tenant, scopes=("submit", "read", "metrics"))

    def statuses(self, key: str, path: str, num: int) -> list[int]:
        """The statuses of so many requests."""
        with self.gateway.http(key) as http:
            return [http.get(path).status_code for _ in range(num)]


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Generator[Limited]:
    """The gateway."""
    url = f"sqlite:///{Path(tmp_path_factory.mktemp('reads')) / 'keys.db'}"
    engine = open_database(url, is_writer=True)
    migrate(engine)
    engine.dispose()
    reads = f"--key-reads={6 * READS_AT_ONCE}"
    with redis_server("valkey") as server, gateway_process(server.url, reads, database_url=url) as made:
        yield Limited(made, url)


def known_key(limited: Limited, tenant: str) -> str:
    """A key that the gateway has read."""
    key = limited.key(tenant)
    with limited.gateway.http(key) as http:
        while http.get("/v1/models").status_code == 401:
            continue  # it reads them twice a second
    return key


def seconds_of_json(messages: object, times: int) -> float:
    """Processor time of this process to write them as JSON so many times: how fast the machine is now."""
    began_s = time.process_time()
    for _ in range(times):
        json.dumps(messages)
    return time.process_time() - began_s


class TestGivenAKeyThatReadsMuch:
    def test_when_it_has_read_what_it_may_then_it_is_429_and_another_is_served(self, limited: Limited) -> None:
        low, other = known_key(limited, "low"), known_key(limited, "other")

        num_served = 0
        with limited.gateway.http(low) as http:
            while (refused := http.get("/v1/models")).status_code == 200:
                num_served += 1

        assert num_served >= READS_AT_ONCE - 2  # the key was tried before
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_reads")
        assert int(refused.headers["retry-after"]) >= 1
        assert limited.statuses(other, "/v1/models", 1) == [200]
        assert limited.gateway.get("/livez").status_code == 200
        assert 'refused_total{bound="key_reads"} 0\n' not in limited.gateway.get("/metrics", other).text

    def test_when_what_it_sends_is_refused_then_that_counts_as_much_as_its_bytes(self, limited: Limited) -> None:
        key = known_key(limited, "refused")

        with limited.gateway.http(key) as http:
            found = [http.post("/v1/completions", content=b"[" + b" " * 100_000).status_code for _ in range(3)]

        assert found == [400, 429, 429]


class TestGivenAResponseOfManyMessages:
    def test_when_a_page_of_its_input_is_read_then_the_others_are_not_formatted(self, limited: Limited) -> None:
        info = ResponseInfo(job_id=JobId("0.long.0123"), created_ms=wall_ms(), model="m", options={})
        messages = ({"role": "user", "content": "x" * 30},) * NUM_ITEMS
        expires_ms = wall_ms() + 600_000
        new = StoredResponse(info=info, tenant="long", queue="default", expires_ms=expires_ms, input=messages)
        with Database(limited.database_url) as database:
            ResponseStore(database).add(new)
        own, keys = psutil.Process(limited.gateway.process.pid), [known_key(limited, "long") for _ in range(2)]
        before_s = sum(own.cpu_times()[:2])

        for key in keys:
            assert limited.statuses(key, f"/v1/responses/{info.id}/input_items?limit=1", 10) == [200] * 10

        took_s = sum(own.cpu_times()[:2]) - before_s
        # Formatting all of them takes about eight times as long as writing them as JSON, on any machine.
        assert took_s < 4 * seconds_of_json(messages, 20)
