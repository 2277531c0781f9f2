"""Real worker processes release chains: soon after the end of the job that others wait for, and once."""

from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sluice.producer import JobState, Producer, Receipt
from sluice.protocol.chains.chain import ChainKeys
from sluice.protocol.keys import QueueKeys
from tests.end_to_end.processes import WorkerPool, worker_pool
from tests.integration.jobs import wait_until
from tests.servers import RedisServer

KEYS = ChainKeys(QueueKeys("default"))
MAX_GAP_S = 0.5
"""Least time that only the look of each second would need in half of the cases."""


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path) -> Generator[WorkerPool]:
    with worker_pool(valkey.url, tmp_path) as made:
        yield made


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        yield client


def submitted(client: Any) -> int:
    """The number of jobs that the queue has accepted."""
    return int(client.hget(QueueKeys("default").key("counters"), "submitted") or 0)


class TestGivenAWorker:
    @pytest.mark.parametrize("queue", ["default", "other"])
    def test_when_a_pipeline_is_submitted_then_each_step_follows_the_one_before_at_once(
        self, workers: WorkerPool, valkey: RedisServer, queue: str
    ) -> None:
        workers.start_all(1, QUEUE="default other")
        with Producer(valkey.url, queue=queue) as producer:
            steps = [producer.submit("first", max_tokens=5)]
            for _ in range(5):
                steps.append(producer.submit("next of {{outputs[0]}}", after=steps[-1:], max_tokens=5))
            producer.result(steps[-1], timeout_s=30)

            views = [view for view in producer.views(steps) if view is not None]

        assert [view.state for view in views] == [JobState.DONE] * 6
        gaps_ms = sorted((later.started_ms or 0) - (before.ended_ms or 0) for before, later in pairwise(views))
        assert 0 <= gaps_ms[len(gaps_ms) // 2] < MAX_GAP_S * 1000, gaps_ms

    def test_when_a_key_of_the_chains_has_another_type_then_the_warning_is_of_chains_and_they_go_on_after_it(
        self, workers: WorkerPool, valkey: RedisServer, client: Any
    ) -> None:
        client.set(KEYS.after, "no sorted set")
        worker = workers.start_all(1)[0]
        worker.wait_for_line("chain not released")
        client.delete(KEYS.after)

        with Producer(valkey.url) as producer:
            parent = producer.submit("parent", max_tokens=1)
            child = producer.submit("child", max_tokens=1, after=[parent])
            producer.result(child, timeout_s=30)

        assert "schedule not run" not in worker.output


class TestGivenTwoWorkersAndManyChains:
    """Two hundred chains wait for one job."""

    @pytest.fixture
    def parent(self, valkey: RedisServer) -> Receipt:
        with Producer(valkey.url) as producer:
            return producer.submit("parent", max_tokens=3)

    @pytest.fixture
    def children(self, valkey: RedisServer, parent: Receipt) -> list[Receipt]:
        with Producer(valkey.url) as producer:
            return [producer.submit(f"{i}: {{{{outputs[0]}}}}", after=[parent], max_tokens=1) for i in range(200)]

    def test_when_one_is_killed_amid_the_release_then_each_job_runs_once(
        self, workers: WorkerPool, valkey: RedisServer, client: Any, parent: Receipt, children: list[Receipt]
    ) -> None:
        first = workers.start_all(2)[0]
        wait_until(lambda: submitted(client) > 20, "the release has begun")
        first.kill()

        with Producer(valkey.url) as producer:
            outcomes = list(producer.results(children))

        assert [outcome.error for outcome in outcomes] == [None] * 200
        assert submitted(client) == 201
        wait_until(lambda: not client.exists(KEYS.chains, KEYS.blocked, KEYS.after), "every chain is removed")
