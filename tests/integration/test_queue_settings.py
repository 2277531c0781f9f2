"""What a worker states of its queue at start, while others work there."""

import pytest

from producer.client import Producer
from producer.contract.calls import inspect
from producer.contract.keys import QueueKeys
from producer.contract.running import run
from producer.errors import InvalidSetting
from tests.integration.jobs import wait_until
from tests.integration.workers import FAST, running_worker
from tests.servers import RedisServer
from worker.config import load_config
from worker.connections import Client, connect
from worker.errors import ConfigError
from worker.serving import load
from worker.start import agree_on_queue

KEYS = QueueKeys("default")


def state(client: Client, **flags: object) -> None:
    """Say what a worker with these flags says before it serves."""
    config = load_config({}, flags={**FAST, **{name.replace("__", "."): value for name, value in flags.items()}})
    agree_on_queue(client, config, load(config))


class TestGivenALivingWorkerThatSaidNothingOfTheHistory:
    def test_when_another_is_told_what_to_keep_then_the_queue_keeps_that_and_its_promises_stand(
        self, valkey: RedisServer
    ) -> None:
        client = connect(valkey.url, timeout_s=5)
        state(client)
        promised = run(client, inspect(KEYS)).settings

        with running_worker(valkey.url):
            wait_until(lambda: run(client, inspect(KEYS)).workers, "the first worker lives")
            state(client, history__keep_prompts="full", history__keep_results=False)
            asked = run(client, inspect(KEYS)).settings
            state(client, model__path="null?max_model_len=16384&num_blocks=4096")
            left = run(client, inspect(KEYS)).settings

        assert asked == left == {**promised, "keep_prompts": "full", "keep_results": "0"}


class TestGivenAQueueOfThreePartitions:
    def test_when_another_number_is_given_while_its_workers_live_then_it_is_refused_on_both_sides(
        self, valkey: RedisServer
    ) -> None:
        client = connect(valkey.url, timeout_s=5)
        state(client, queue__partitions=3)

        with running_worker(valkey.url, queue__partitions=3):
            wait_until(lambda: run(client, inspect(KEYS)).workers, "it lives")
            with pytest.raises(ConfigError, match="serve 3 partitions, this one would serve 1"):
                state(client)
            with Producer(valkey.url, partitions=4) as producer, pytest.raises(InvalidSetting, match="PARTITIONS=3"):
                producer.submit("nobody would look there")
            with Producer(valkey.url, partitions=3) as producer:
                assert producer.result(producer.submit("hi", max_tokens=2), timeout_s=20).text

        state(client, queue__partitions=2)
        assert run(client, inspect(KEYS)).settings["partitions"] == "2"

    def test_when_fewer_would_leave_jobs_to_nobody_then_it_is_refused(self, valkey: RedisServer) -> None:
        client = connect(valkey.url, timeout_s=5)
        with Producer(valkey.url, partitions=2) as producer:
            list(producer.submit_many(["spread over both"] * 20))

        with pytest.raises(ConfigError, match="partition 1 of 'default' has jobs"):
            state(client)
        state(client, queue__partitions=2)
