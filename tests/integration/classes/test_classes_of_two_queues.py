"""Classes of two queues on one worker: those of one do not take the worker from the other."""

from collections.abc import Generator
from typing import Any

import pytest

from sluice.protocol.calls import inspect
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobOptions
from tests.integration.jobs import Ask, num_on_channel, state_of, submit_all, wait_for_ends, wait_until
from tests.integration.workers import running_worker
from tests.servers import RedisServer

CHAT, BATCH = QueueKeys("chat"), QueueKeys("batch")
SLOW = "null?step_s=0.005"
LOW = Ask(options=JobOptions(max_tokens=20), stream=False)
HIGH = Ask(options=JobOptions(max_tokens=20), stream=False, priority=9)


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        for keys in (CHAT, BATCH):
            client.hset(keys.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


def num_taken(client: Any, keys: QueueKeys, submitted: int) -> int:
    return submitted - run(client, inspect(keys)).waiting_jobs


class TestGivenAFullWorkerWithTwoPlaces:
    def test_when_one_queue_has_higher_classes_then_the_other_has_its_share(
        self, valkey: RedisServer, client: Any
    ) -> None:
        chat, batch = submit_all(client, [LOW] * 40, keys=CHAT), submit_all(client, [HIGH] * 40, keys=BATCH)

        with running_worker(valkey.url, model__path=SLOW, batching__max_num_seqs=2, queue__name=("chat", "batch")):
            wait_until(lambda: num_taken(client, BATCH, 40) >= 20, "half of batch is taken")
            taken = num_taken(client, CHAT, 40)
            wait_for_ends(client, chat, keys=CHAT)
            wait_for_ends(client, batch, keys=BATCH)

        assert taken >= 15

    def test_when_the_lower_one_has_had_its_share_then_the_higher_one_interrupts_it(
        self, valkey: RedisServer, client: Any
    ) -> None:
        long = Ask(options=JobOptions(max_tokens=400), stream=False)
        with running_worker(valkey.url, model__path=SLOW, batching__max_num_seqs=2, queue__name=("chat:3", "batch")):
            batch = submit_all(client, [long] * 4, keys=BATCH)
            wait_until(lambda: all(num_on_channel(client, one, keys=BATCH) for one in batch[:2]), "batch generates")

            (urgent,) = submit_all(client, [HIGH], keys=CHAT)
            wait_for_ends(client, [urgent], keys=CHAT)

            assert [state_of(client, one, keys=BATCH) for one in batch[:2]] == [JobState.RUNNING] * 2
