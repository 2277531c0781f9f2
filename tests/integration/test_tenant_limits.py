"""A worker with much room, and a tenant that may run one job at once."""

from itertools import pairwise

from sluice.producer import Producer, QueueSettings
from sluice.protocol.calls import inspect
from sluice.protocol.redis.execution import run
from tests.integration.jobs import KEYS
from tests.integration.workers import running_worker
from tests.servers import RedisServer


class TestGivenATenantThatMayRunOneJob:
    def test_when_it_submits_several_then_they_run_one_after_the_other(self, valkey: RedisServer) -> None:
        with Producer(valkey.url) as producer, valkey.client() as client:
            producer.configure(QueueSettings(max_running={"few": 1}))
            jobs = [producer.submit("hello", tenant="few", max_tokens=8) for _ in range(4)]
            others = [producer.submit("hello", tenant="many", max_tokens=8) for _ in range(4)]

            with running_worker(valkey.url):
                for job in (*jobs, *others):
                    producer.result(job, timeout_s=30)

            spans = sorted((view.started_ms or 0, view.ended_ms or 0) for view in map(producer.status, jobs))
            assert all(before[1] <= after[0] for before, after in pairwise(spans))
            assert run(client, inspect(KEYS)).running_jobs == 0
            assert client.exists(KEYS.key("leased", "few"), KEYS.key("parked")) == 0
