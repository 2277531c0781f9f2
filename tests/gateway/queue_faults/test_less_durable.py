"""Jobs that the queue has, but that its replica has not confirmed, over HTTP."""

from collections.abc import Generator
from dataclasses import dataclass

import pytest

from sluice.producer import Producer
from sluice.protocol.calls import QueueSettings
from sluice.protocol.keys import QueueKeys
from tests.chaos.faults.replicated import replicated
from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.servers import RedisServer


@dataclass(frozen=True)
class Lagging:
    """A gateway of a queue that asks for `replica:1`, whose replica has stopped."""

    gateway: GatewayProcess
    server: RedisServer

    @property
    def num_warnings(self) -> int:
        """How many jobs the gateway's log calls less durable."""
        return self.gateway.log.read_text().count("A job is less durable than its queue requires")

    @property
    def num_submitted(self) -> int:
        """How many jobs the queue has taken."""
        with self.server.client() as client:
            return int(client.hget(QueueKeys("default").key("counters"), "submitted") or 0)


@pytest.fixture(scope="module")
def lagging(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lagging]:
    """One for all tests, which submit."""
    with replicated() as pair, worker_pool(pair.primary.url, tmp_path_factory.mktemp("lagging")) as pool:
        pool.start_all(1)
        with Producer(pair.primary.url) as producer, gateway_process(pair.primary.url) as gateway:
            producer.configure(QueueSettings(durability="replica:1"))
            pair.stop_replica()
            yield Lagging(gateway, pair.primary)
            pair.resume_replica()


class TestGivenAReplicaThatStopped:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "3 4"}], "max_tokens": 3}),
            ("/v1/completions", {"prompt": "3 4", "max_tokens": 3}),
            ("/v1/responses", {"input": "3 4", "max_output_tokens": 3, "store": False}),
        ],
    )
    def test_when_text_is_asked_for_then_its_one_job_is_served_and_the_log_says_so(
        self, lagging: Lagging, path: str, body: dict[str, object]
    ) -> None:
        num_submitted, num_warnings = lagging.num_submitted, lagging.num_warnings

        with lagging.gateway.http() as http:
            answer = http.post(path, json={"model": "null", **body})

        assert answer.status_code == 200
        assert (lagging.num_submitted, lagging.num_warnings) == (num_submitted + 1, num_warnings + 1)

    def test_when_a_job_is_submitted_then_the_receipt_says_that_it_is_less_durable(self, lagging: Lagging) -> None:
        with lagging.gateway.http() as http:
            answer = http.post("/jobs", json={"prompt": "3 4", "max_tokens": 3})

            assert (answer.status_code, answer.json()["is_less_durable"]) == (201, True)
            assert http.get(f"/jobs/{answer.json()['id']}").status_code == 200
