"""A worker measures what it gets through, tells it with its heartbeats, and leaves it in the queue."""

from typing import Any

import pytest

from sluice.protocol.redis.surveys import survey
from sluice.protocol.scaling.backlog import Backlog, backlog_of
from sluice.protocol.wire import JobOptions
from sluice.worker.audit.queue_side import QueueSide
from sluice.worker.jobs import capacity
from tests.integration.jobs import KEYS, Ask, submit_all, wait_for_ends, wait_until
from tests.integration.test_queue_depth import scrape
from tests.integration.workers import running_worker
from tests.servers import RedisServer, free_port

COST, OUTPUT = 51, 50
"""Of a job: its prompt of one token, and all that it generates."""


def backlog(client: Any) -> Backlog:  # Any: a redis-py client
    """The backlog now."""
    return backlog_of("default", [survey(client, KEYS)])


@pytest.mark.slow
class TestGivenAWorkerThatIsFull:
    """Two sequences of at most 100 tokens a second each."""

    def test_when_it_has_measured_then_its_rate_is_told_and_left_behind(
        self, valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(capacity, "WINDOW_S", 0.5)
        asks = [Ask(prompt=(1,), options=JobOptions(max_tokens=OUTPUT), seed=seed) for seed in range(8)]
        with valkey.client() as client:
            job_ids = submit_all(client, asks)
            reserved = backlog(client)
            with running_worker(valkey.url, model__path="null?step_s=0.01", batching__max_num_seqs=2):
                wait_until(lambda: backlog(client).rate_source == "measured", "it has measured itself")
                busy = backlog(client)
                wait_for_ends(client, job_ids)
                wait_until(lambda: backlog(client).running_tokens == 0, "it tells that it holds nothing")
            left = backlog(client)

        assert reserved.backlog_tokens == 8 * COST
        assert busy.running_jobs == 2
        assert 0 < busy.running_tokens <= 2 * COST
        assert (left.workers, left.backlog_jobs, left.rate_source) == (0, 0, "remembered")
        # A busy machine may be slower than the model.
        assert 0 < (left.worker_tokens_per_s or 0) <= 1.1 * 200 * COST / OUTPUT


@pytest.mark.slow
class TestGivenAServerThatIsFull:
    """At maxmemory it refuses a plain write, and a heartbeat is none."""

    def test_when_a_worker_has_measured_then_that_is_no_outage(
        self, valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(capacity, "WINDOW_S", 0.5)
        asks = [Ask(prompt=(1,), options=JobOptions(max_tokens=OUTPUT), seed=seed) for seed in range(4)]
        port, model = free_port(), "null?step_s=0.01"
        with valkey.client() as client:
            job_ids = submit_all(client, asks)
            try:
                client.config_set("maxmemory", 1)
                with running_worker(
                    valkey.url,
                    metrics__enabled=True,
                    metrics__port=port,
                    model__path=model,
                    batching__max_num_seqs=2,
                ):
                    wait_until(lambda: backlog(client).rate_source == "measured", "it has measured itself")
                    wait_for_ends(client, job_ids)
                    outages = scrape(port)["sluice_redis_outages_total"]
            finally:
                client.config_set("maxmemory", 0)

        assert outages == 0


class TestGivenAQueueWhoseSettingsWereLost:
    def test_when_only_a_rate_was_written_since_then_the_audit_still_sees_the_loss(self, valkey: RedisServer) -> None:
        with valkey.client() as client:
            client.hset(KEYS.key("config"), "capacity", "1.0")

            assert QueueSide(client, KEYS).lost_settings(1) == "there are none"
