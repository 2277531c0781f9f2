"""Classes from end to end: a job of a higher class interrupts a full worker, and what it interrupts goes on exactly."""

from collections.abc import Generator
from typing import Any

import pytest

from sluice.protocol.states import JobState
from sluice.protocol.wire import JobOptions
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    num_on_channel,
    state_of,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.integration.workers import running_worker
from tests.servers import RedisServer

SLOW = "null?step_s=0.005"
BATCH = Ask(options=JobOptions(max_tokens=400), seed=3, stream=False)
INTERACTIVE = Ask(prompt="now", options=JobOptions(max_tokens=10), priority=9)


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


class TestGivenAWorkerFullOfBatchJobs:
    """It has two places; more jobs of class 0 wait in the queue."""

    @pytest.mark.parametrize(("policy", "is_interrupted"), [("priority", True), ("fcfs", False)])
    def test_when_an_interactive_job_comes_then_it_takes_a_place_under_priority(
        self, valkey: RedisServer, client: Any, policy: str, is_interrupted: bool
    ) -> None:
        with running_worker(valkey.url, model__path=SLOW, batching__max_num_seqs=2, batching__policy=policy) as worker:
            batch = submit_all(client, [BATCH] * 6)
            wait_until(lambda: all(num_on_channel(client, one) for one in batch[:2]), "the batch generates")

            (urgent,) = submit_all(client, [INTERACTIVE])
            wait_for_ends(client, [urgent])

            assert all(state_of(client, one) is JobState.RUNNING for one in batch[:2]) is is_interrupted
            assert client.hlen(KEYS.key("held", worker.incarnation)) <= 3, "the others wait where any worker sees them"
            wait_for_ends(client, batch)

        check_every_token_once(client, {urgent: INTERACTIVE} | dict.fromkeys(batch, BATCH))
        check_nothing_is_left(client)

    def test_when_more_of_their_class_come_then_it_takes_none(self, valkey: RedisServer, client: Any) -> None:
        with running_worker(valkey.url, model__path=SLOW, batching__max_num_seqs=2) as worker:
            batch = submit_all(client, [BATCH] * 2)
            wait_until(lambda: all(num_on_channel(client, one) for one in batch), "the batch generates")

            more = submit_all(client, [BATCH] * 4)
            wait_until(lambda: num_on_channel(client, batch[0]) > 128, "steps pass")

            assert client.hlen(KEYS.key("held", worker.incarnation)) == 2
            wait_for_ends(client, [*batch, *more])
