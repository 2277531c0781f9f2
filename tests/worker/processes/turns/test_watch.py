"""Heartbeats for models without their device, and what is seen of their queues, on a real server."""

from collections.abc import Generator
from typing import Any

import pytest

from sluice.producer import Producer
from sluice.protocol.calls import Beat, beat, inspect, list_workers
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.workers import LOADING, WAITING_FOR_ITS_TURN
from sluice.worker.config import load_config
from sluice.worker.log import get_log
from sluice.worker.processes.turns.policy import weight_of
from sluice.worker.processes.turns.watch import Watch, Watched
from sluice.worker.status import living_workers, table_of
from tests.integration.jobs import wait_until
from tests.servers import RedisServer

NAMES = ("a", "b")
KEYS = {name: QueueKeys(name) for name in NAMES}
OFFER = "engine=sluice 1; exactness=bitwise; features=logprobs; formats=; refused=; families=llama; weights=plain"
CONFIGS = {name: load_config({"SLUICE_QUEUE": name, "SLUICE_BEAT_EVERY_S": "0.05"}) for name in NAMES}


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        yield client


@pytest.fixture
def watch(valkey: RedisServer) -> Generator[Watch]:
    """Of two models; both are away."""
    members = {name: Watched(model=f"model-{name}", config=CONFIGS[name]) for name in NAMES}
    made = Watch(valkey.url, members, get_log())
    made.state(dict.fromkeys(NAMES, WAITING_FOR_ITS_TURN))
    made.start()
    wait_until(lambda: made.seen, "it has looked")
    yield made
    made.close()


def states(client: Any, name: str) -> list[str]:
    """The states of a queue's workers."""
    return [about["state"] for about in run(client, list_workers(KEYS[name])).workers.values()]


def beat_as_worker(client: Any, name: str) -> None:
    """Beat as the worker of a queue does."""
    about = {"model": f"model-{name}", "state": "pulling", "offer": OFFER}
    run(client, beat(KEYS[name], Beat(incarnation="w", held=(), processed_pull=0, expiry_ms=60_000, about=about)))


class TestGivenTwoModelsThatAreAway:
    def test_when_their_queues_are_read_then_both_models_live_and_wait_for_their_turn(
        self, watch: Watch, client: Any, valkey: RedisServer
    ) -> None:
        assert [run(client, inspect(KEYS[name])).models for name in NAMES] == [("model-a",), ("model-b",)]
        assert [states(client, name) for name in NAMES] == [[WAITING_FOR_ITS_TURN]] * 2
        assert "waiting for its turn" in table_of(living_workers(CONFIGS["a"], valkey.url), "a")
        assert watch.seen["a"].is_unserved

    @pytest.mark.parametrize(
        ("state", "reason"), [(WAITING_FOR_ITS_TURN, "waits for its turn"), (LOADING, "is loaded")]
    )
    def test_when_a_job_is_submitted_then_it_is_accepted_and_says_what_it_waits_for(
        self, watch: Watch, client: Any, valkey: RedisServer, state: str, reason: str
    ) -> None:
        watch.state({"a": state, "b": WAITING_FOR_ITS_TURN})
        wait_until(lambda: states(client, "a") == [state], "the heartbeat says so")

        with Producer(valkey.url, queue="a") as producer:
            job_id = producer.submit("Hello", model="model-a", logprobs=1)

            assert reason in (producer.status(job_id).waits_for or "")

    def test_when_jobs_wait_then_their_number_and_their_ages_by_class_are_seen(
        self, watch: Watch, valkey: RedisServer
    ) -> None:
        with Producer(valkey.url, queue="a") as producer:
            for priority in (0, 4, 4):
                producer.submit("Hello", priority=priority)

        wait_until(lambda: watch.seen["a"].backlog.backlog_jobs == 3, "they are seen")
        assert set(watch.seen["a"].oldest_s) == {weight_of(0), weight_of(4)}
        assert 0 <= max(watch.seen["a"].oldest_s.values()) < 60
        assert watch.seen["b"].backlog.backlog_jobs == 0

    def test_when_the_time_of_a_job_is_over_then_it_expires_without_a_worker(
        self, watch: Watch, valkey: RedisServer
    ) -> None:
        del watch
        with Producer(valkey.url, queue="a") as producer:
            job_id = producer.submit("Hello", ttl_s=0.2)

            wait_until(lambda: producer.status(job_id).state is JobState.EXPIRED, "it has expired")

    def test_when_a_worker_has_its_turn_then_the_model_lives_until_that_beats_itself(
        self, watch: Watch, client: Any
    ) -> None:
        watch.state({"a": None, "b": WAITING_FOR_ITS_TURN})
        wait_until(lambda: states(client, "a") == [LOADING], "it lives")

        beat_as_worker(client, "a")

        wait_until(lambda: states(client, "a") == ["pulling"], "only the worker beats")

    def test_when_a_worker_has_left_then_what_its_engine_offers_stays(self, watch: Watch, client: Any) -> None:
        beat_as_worker(client, "a")
        wait_until(lambda: not watch.seen["a"].is_unserved, "it is seen")
        client.delete(KEYS["a"].key("alive"), KEYS["a"].key("offers"))

        wait_until(lambda: run(client, inspect(KEYS["a"])).offers == {"model-a": (OFFER,)}, "the fleet says so")

    def test_when_it_is_closed_then_no_model_lives(self, watch: Watch, client: Any) -> None:
        watch.close()

        assert [states(client, name) for name in NAMES] == [[], []]


class TestGivenAServerThatGoesAway:
    def test_when_it_is_back_then_models_live_again(self, durable_valkey: RedisServer) -> None:
        watch = Watch(durable_valkey.url, {"a": Watched(model="model-a", config=CONFIGS["a"])}, get_log())
        watch.state({"a": WAITING_FOR_ITS_TURN})
        watch.start()
        wait_until(lambda: watch.seen, "it has looked")
        before_s = watch.seen["a"].at_s
        durable_valkey.stop()

        durable_valkey.start()

        wait_until(lambda: watch.seen["a"].at_s > before_s, "it has looked again")
        with durable_valkey.client() as client:
            assert states(client, "a") == [WAITING_FOR_ITS_TURN]
        watch.close()
