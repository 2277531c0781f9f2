"""The queue settings that a worker states at start, while other workers run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from redis.exceptions import ResponseError

from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import LatencyTargets, Request
from sluice.producer.client import Producer
from sluice.producer.errors import InvalidSetting, JobFailed
from sluice.protocol.calls import QueueSettings, configure, inspect
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.worker.checks.queue_check import agree_on_queue
from sluice.worker.cli import main
from sluice.worker.config import load_config
from sluice.worker.connection.clients import Client, connect
from sluice.worker.errors import ConfigError
from sluice.worker.model.load import load
from sluice.worker.model.loaded_model import LocalModel
from tests.integration.jobs import wait_until
from tests.integration.workers import FAST, running_worker
from tests.servers import RedisServer

KEYS = QueueKeys("default")


def state(client: Client, **flags: object) -> None:
    """State the settings as a worker with these flags does before it serves."""
    config = load_config({}, flags={**FAST, **{name.replace("__", "."): value for name, value in flags.items()}})
    agree_on_queue(client, config, load(config))


def wait_for_beat(client: Client, incarnation: str) -> None:
    """Until the worker has beaten once more."""
    key = KEYS.key("worker", incarnation)
    last = client.hget(key, "beaten")
    wait_until(lambda: client.hget(key, "beaten") != last, "it beats")


class TestGivenALivingWorkerThatSaidNothingOfTheHistory:
    def test_when_another_worker_sets_retention_then_only_that_setting_changes(self, valkey: RedisServer) -> None:
        client = connect(valkey.url, timeout_s=5)
        state(client)
        promised = run(client, inspect(KEYS)).settings

        with running_worker(valkey.url):
            wait_until(lambda: run(client, inspect(KEYS)).num_workers, "the first worker lives")
            state(client, history__keep_prompts="full", history__keep_results=False)
            asked = run(client, inspect(KEYS)).settings
            state(client, model__path="null?max_model_len=16384&num_blocks=4096")
            left = run(client, inspect(KEYS)).settings

        assert asked == left == {**promised, "keep_prompts": "full", "keep_results": "0"}


class TestGivenAQueueOfThreePartitions:
    def test_when_the_number_changes_while_workers_live_then_both_sides_refuse(self, valkey: RedisServer) -> None:
        client = connect(valkey.url, timeout_s=5)
        state(client, queue__partitions=3)

        with running_worker(valkey.url, queue__partitions=3):
            wait_until(lambda: run(client, inspect(KEYS)).num_workers, "it lives")
            with pytest.raises(ConfigError, match="serve 3 partitions, this one would serve 1"):
                state(client)
            with Producer(valkey.url, partitions=4) as producer, pytest.raises(InvalidSetting, match="or give 3"):
                producer.submit("no worker would look there")
            with Producer(valkey.url, partitions=3) as producer:
                assert producer.result(producer.submit("hi", max_tokens=2), timeout_s=20).text

        state(client, queue__partitions=2)
        assert run(client, inspect(KEYS)).settings["partitions"] == "2"

    def test_when_fewer_would_leave_jobs_unserved_then_it_is_refused(self, valkey: RedisServer) -> None:
        client = connect(valkey.url, timeout_s=5)
        with Producer(valkey.url, partitions=2) as producer:
            list(producer.submit_many(["spread over both"] * 20))

        with pytest.raises(ConfigError, match="partition 1 of 'default' has jobs"):
            state(client)
        state(client, queue__partitions=2)


class TestGivenALivingWorkerAndSettingsThatAreLost:
    def test_when_redis_forgets_all_then_the_worker_writes_them_again(self, valkey: RedisServer) -> None:
        client = connect(valkey.url, timeout_s=5)
        state(client, history__keep_prompts="none")

        with running_worker(valkey.url) as worker:
            wait_until(lambda: run(client, inspect(KEYS)).num_workers, "it lives")
            run(client, configure(KEYS, QueueSettings(max_waiting_jobs=77)))
            asked = run(client, inspect(KEYS)).settings
            for _ in range(2):  # the first reply has the new stamp, and before the next the settings are read
                wait_for_beat(client, worker.incarnation)
            client.flushall()
            wait_until(lambda: "keep_prompts" in run(client, inspect(KEYS)).settings, "the settings are back")

            assert run(client, inspect(KEYS)).settings == asked


class TestGivenALivingWorkerAndAQueueWithTargets:
    """Every request that its engine gets is noted."""

    def test_when_the_targets_change_then_later_jobs_ask_for_the_new_ones(
        self, valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[LatencyTargets] = []
        add = LLMEngine.add

        def noted(engine: LLMEngine, requests: list[Request]) -> None:
            asked.extend(request.targets for request in requests)
            add(engine, requests)

        monkeypatch.setattr(LLMEngine, "add", noted)
        client = connect(valkey.url, timeout_s=5)
        with Producer(valkey.url) as producer:
            producer.configure(QueueSettings(ttft_target_ms=800, tpot_target_ms=62.5))
            with running_worker(valkey.url, batching__tpot_target_s=0.2) as worker:
                for change in (None, QueueSettings(tpot_target_ms=25), QueueSettings(ttft_target_ms=0)):
                    if change is not None:
                        producer.configure(change)
                        for _ in range(2):  # the reply after the next has the new stamp
                            wait_for_beat(client, worker.incarnation)
                    producer.result(producer.submit("hi", max_tokens=2), timeout_s=20)

        assert asked == [
            LatencyTargets(ttft_s=0.8, tpot_s=0.0625),
            LatencyTargets(ttft_s=0.8, tpot_s=0.025),
            LatencyTargets(tpot_s=0.025),
        ]

    @pytest.mark.parametrize("value", ["-1", "soon", "nan", "inf"])
    def test_when_a_target_is_no_time_then_the_queue_refuses_it(self, valkey: RedisServer, value: str) -> None:
        client = connect(valkey.url, timeout_s=5)
        call = replace(configure(KEYS, QueueSettings()), args=("tpot_target_ms", value))

        with pytest.raises(ResponseError, match="tpot_target_ms must be a number from 0"):
            run(client, call)


def renamed(name: str) -> Callable[[LocalModel], LocalModel]:
    """Make the model of a worker one of this name."""
    return lambda served: replace(served, name=name)


class TestGivenTwoModelsOnOneQueue:
    def test_when_jobs_name_one_of_them_then_all_are_done_by_it(self, valkey: RedisServer) -> None:
        client = connect(valkey.url, timeout_s=5)
        with (
            running_worker(valkey.url, change=renamed("small")),
            running_worker(valkey.url, change=renamed("large")),
            Producer(valkey.url) as producer,
        ):
            wait_until(lambda: run(client, inspect(KEYS)).num_workers == 2, "both live")

            jobs = [producer.submit("hi", model="large", max_tokens=4) for _ in range(20)]

            results = [producer.result(one, timeout_s=20) for one in jobs]
            assert {result.model for result in results} == {"large"}
            assert {producer.status(one).attempt for one in jobs} == {1}

    def test_when_nobody_serves_the_model_then_the_job_fails_and_says_so(self, valkey: RedisServer) -> None:
        with running_worker(valkey.url, change=renamed("small")), Producer(valkey.url) as producer:
            job = producer.submit("hi", model="large")

            with pytest.raises(JobFailed, match="asks for the model 'large'; this queue serves 'small'"):
                producer.result(job, timeout_s=20)

    def test_when_looked_at_then_doctor_and_status_warn(self, valkey: RedisServer, tmp_path: Path) -> None:
        asked = ["--redis-url", valkey.url]
        history = ["--database-url", f"sqlite:///{tmp_path}/h.db"]
        client = connect(valkey.url, timeout_s=5)
        with running_worker(valkey.url, change=renamed("small")), running_worker(valkey.url):
            wait_until(lambda: run(client, inspect(KEYS)).num_workers == 2, "both live")

            examined = CliRunner().invoke(main, ["doctor", *asked, *history, "--model", "null"]).output
            listed = CliRunner().invoke(main, ["status", *asked]).output

        assert "warn   queue models: its workers serve several models: null, small" in examined
        assert "warning: its workers serve several models: null, small" in listed
