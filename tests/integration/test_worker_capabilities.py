"""Two workers of one queue whose engines can run different jobs: none is run differently than it asks."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from sluice.engine.capabilities import NUM_CHOICES
from sluice.producer.client import Producer
from sluice.producer.errors import InvalidJob, JobFailed
from sluice.protocol.calls import Beat, beat, inspect
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.sampling import FEATURES
from sluice.protocol.states import JobState
from sluice.worker.checks.queue_check import agree_on_queue
from sluice.worker.config import load_config
from sluice.worker.connection.clients import Client, connect
from sluice.worker.model.load import load
from sluice.worker.model.loaded_model import LocalModel
from sluice.worker.model.offered import features_without
from tests.integration.jobs import field_of, state_of, wait_until
from tests.integration.workers import FAST, running_worker
from tests.servers import RedisServer

KEYS = QueueKeys("default")
REASON = "its sampler has none"


def without(*refused: str) -> Callable[[LocalModel], LocalModel]:
    """Let the engine of a worker refuse options."""

    def change(served: LocalModel) -> LocalModel:
        reasons = dict.fromkeys(refused, REASON)
        capabilities = replace(
            served.facts.capabilities, engine="lean", refused=reasons, features=features_without(reasons)
        )
        return replace(served, facts=replace(served.facts, capabilities=capabilities))

    return change


@pytest.fixture
def client(valkey: RedisServer) -> Client:
    return connect(valkey.url, timeout_s=5)


def wait_for_workers(client: Client, number: int) -> None:
    wait_until(lambda: run(client, inspect(KEYS)).num_workers == number, f"{number} workers live")


def wait_for_features(client: Client, features: str) -> None:
    wait_until(lambda: run(client, inspect(KEYS)).settings.get("features") == features, f"{features!r} are offered")


class TestGivenAnEngineThatRefusesMinP:
    """The option has no feature that a submit could check."""

    def test_when_no_other_lives_then_the_job_fails_with_the_sentence(
        self, valkey: RedisServer, client: Client
    ) -> None:
        with running_worker(valkey.url, change=without("min_p")), Producer(valkey.url) as producer:
            wait_for_workers(client, 1)

            with pytest.raises(JobFailed, match=rf"the engine lean \S+ refuses min_p: {REASON}") as raised:
                producer.result(producer.submit("hi", min_p=0.1, max_tokens=2), timeout_s=20)

            assert raised.value.code == "option_refused"
            assert producer.result(producer.submit("hi", min_p=0.0, max_tokens=2), timeout_s=20).text

    def test_when_another_worker_implements_it_then_that_one_runs_the_job(
        self, valkey: RedisServer, client: Client
    ) -> None:
        with running_worker(valkey.url, change=without("min_p")) as lean, running_worker(valkey.url) as full:
            wait_for_workers(client, 2)
            with Producer(valkey.url) as producer:
                jobs = [producer.submit(f"hi {number}", min_p=0.1, max_tokens=3) for number in range(20)]
                results = [producer.result(job, timeout_s=30) for job in jobs]

            assert all(result.text for result in results)
            owners = {field_of(client, job.id, "ended_by") for job in jobs}
            assert {owner.split(":")[0] for owner in owners if owner} == {full.incarnation}
            assert lean.incarnation != full.incarnation

    def test_when_the_other_worker_dies_before_it_took_the_job_then_it_fails_with_the_sentence(
        self, valkey: RedisServer, client: Client
    ) -> None:
        with running_worker(valkey.url, change=without("min_p")), Producer(valkey.url) as producer:
            wait_for_workers(client, 1)
            about = {"model": "null", "offer": str(load(load_config({}, flags=FAST)).offer)}
            silent = Beat(incarnation="silent", held=(), processed_pull=0, expiry_ms=3000, about=about)
            run(client, beat(KEYS, silent))
            job = producer.submit("hi", min_p=0.1, max_tokens=3)

            wait_until(lambda: field_of(client, job.id, "declined"), "it is declined")
            assert state_of(client, job.id) is JobState.QUEUED

            with pytest.raises(JobFailed, match="refuses min_p"):
                producer.result(job, timeout_s=30)


WITHOUT_CHOICES = ",".join(feature for feature in FEATURES if feature not in ("choices", "tools"))
"""The features of the null model then; its template has no format of calls."""


class TestGivenAnEngineWithoutChoices:
    def test_when_no_other_lives_then_the_submit_is_refused(self, valkey: RedisServer, client: Client) -> None:
        with running_worker(valkey.url, change=without(NUM_CHOICES)), Producer(valkey.url) as producer:
            wait_for_features(client, WITHOUT_CHOICES)

            with pytest.raises(InvalidJob, match="no worker of this queue offers choices"):
                producer.submit("hi", n=2, max_tokens=2)

    def test_when_another_offers_them_then_that_one_runs_the_job_and_once_it_leaves_none_is_taken(
        self, valkey: RedisServer, client: Client
    ) -> None:
        with running_worker(valkey.url, change=without(NUM_CHOICES)), Producer(valkey.url) as producer:
            with running_worker(valkey.url):
                wait_for_workers(client, 2)
                wait_until(lambda: "choices" in run(client, inspect(KEYS)).settings["features"], "choices are offered")
                result = producer.result(producer.submit("hi", n=2, max_tokens=2), timeout_s=30)
                assert len(result.choices) == 2

            wait_for_features(client, WITHOUT_CHOICES)
            with pytest.raises(InvalidJob, match="no worker of this queue offers choices"):
                producer.submit("hi", n=2, max_tokens=2)

    def test_when_it_starts_the_queue_then_its_features_are_stated_before_its_first_heartbeat(
        self, client: Client
    ) -> None:
        config = load_config({}, flags=FAST)

        agree_on_queue(client, config, without(NUM_CHOICES)(load(config)))

        assert run(client, inspect(KEYS)).settings["features"] == WITHOUT_CHOICES
