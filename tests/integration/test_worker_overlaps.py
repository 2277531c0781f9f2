"""A worker whose device lags by one step: publishing, handover, cancellation."""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullTokenizer
from sluice.protocol.calls import cancel
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobOptions
from sluice.worker.model.loaded_model import LocalModel
from tests.engine.lagging import LaggingExecutor
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    num_on_channel,
    result_of,
    state_of,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.integration.workers import running_worker
from tests.servers import RedisServer

SLOW = "null?step_s=0.005"


def late(served: LocalModel) -> LocalModel:
    """The same model, on a device that lags."""
    executor = LaggingExecutor(served.executor)
    return replace(served, executor=executor, engine=LLMEngine(executor, NullTokenizer(), EngineConfig()))


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


class TestGivenADeviceThatLags:
    def test_when_jobs_of_all_kinds_come_then_each_token_is_published_once(
        self, valkey: RedisServer, client: Any
    ) -> None:
        asks = [
            Ask(options=JobOptions(max_tokens=1)),
            Ask(options=JobOptions(max_tokens=40)),
            Ask(options=JobOptions(max_tokens=30, n=3), seed=11),
            Ask(options=JobOptions(max_tokens=200), stream=False),
            Ask(options=JobOptions(max_tokens=50, stop=("e",)), seed=3),
            Ask(options=JobOptions(max_tokens=20, repetition_penalty=1.2), seed=4),
            Ask(prompt="x" * 5000, options=JobOptions(max_tokens=3)),
        ]
        with running_worker(valkey.url, change=late):
            job_ids = submit_all(client, asks)
            wait_for_ends(client, job_ids)

            check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
            check_nothing_is_left(client)

    def test_when_it_hands_over_a_job_in_flight_then_the_next_resumes_at_the_offset(
        self, valkey: RedisServer, client: Any
    ) -> None:
        ask = Ask(options=JobOptions(max_tokens=100, n=2), seed=5)
        with running_worker(valkey.url, model__path=SLOW, drain__mode="hand-over", change=late):
            (job_id,) = submit_all(client, [ask])
            wait_until(lambda: num_on_channel(client, job_id) >= 10, "it speaks")
        assert state_of(client, job_id) is JobState.QUEUED

        with running_worker(valkey.url, model__path=SLOW, change=late):
            wait_for_ends(client, [job_id])

        check_every_token_once(client, {job_id: ask})

    def test_when_it_is_drained_then_what_is_in_flight_is_published_first(
        self, valkey: RedisServer, client: Any
    ) -> None:
        ask = Ask(options=JobOptions(max_tokens=60), seed=5)
        with running_worker(valkey.url, model__path=SLOW, change=late) as worker:
            (job_id,) = submit_all(client, [ask])
            wait_until(lambda: num_on_channel(client, job_id) >= 10, "it speaks")
            worker.stop()

            assert state_of(client, job_id) is JobState.DONE
        check_every_token_once(client, {job_id: ask})
        check_nothing_is_left(client)

    def test_when_a_job_is_cancelled_in_flight_then_no_other_is_disturbed(
        self, valkey: RedisServer, client: Any
    ) -> None:
        other = Ask(options=JobOptions(max_tokens=80), seed=7)
        with running_worker(valkey.url, model__path=SLOW, change=late):
            job_id, other_id = submit_all(client, [Ask(options=JobOptions(max_tokens=5000)), other])
            wait_until(lambda: num_on_channel(client, job_id) >= 5, "tokens flow")

            assert run(client, cancel(KEYS, [job_id])) == ["asked"]
            wait_for_ends(client, [job_id, other_id])

            assert state_of(client, job_id) is JobState.CANCELLED
            assert 5 <= len(result_of(client, job_id).choices[0].token_ids) < 5000
            check_every_token_once(client, {other_id: other})
            check_nothing_is_left(client)
