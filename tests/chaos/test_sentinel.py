"""A real Sentinel: the primary is killed in mid-job, and a replica, behind by a known amount, takes its place."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from sluice.producer import AsyncProducer, Producer, Receipt
from sluice.protocol.wire import JobId, JobOptions
from tests.chaos.faults.replicated import SERVICE, Watched, watched
from tests.chaos.network.site import takes_for_up
from tests.end_to_end.processes import worker_pool
from tests.integration.jobs import (
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    expected_tokens,
    field_of,
    num_on_channel,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.integration.workers import running_worker
from tests.servers import Flavor

SLOW = "null?step_s=0.02"
NUM_KEPT, NUM_SAID, NUM_TOKENS = 20, 60, 150
TAKEOVER_S = 10.0
"""The Sentinel's detection time, election and failover, and a worker's next token."""


@pytest.fixture(params=["valkey", *(pytest.param(one, marks=pytest.mark.long) for one in ("redis-7.0", "redis-6.2"))])
def service(request: pytest.FixtureRequest) -> Iterator[Watched]:
    flavor: Flavor = request.param
    with watched(flavor) as service:
        yield service


class Listener:
    """A reader on a separate thread, through the Sentinel. Mutable."""

    def __init__(self, url: str, job_id: JobId) -> None:
        self.output: tuple[list[int], str] = ([], "")
        self._thread = threading.Thread(target=self._listen, args=(url, job_id), daemon=True)
        self._thread.start()

    def _listen(self, url: str, job_id: JobId) -> None:
        token_ids, text = list[int](), ""
        with Producer(url) as producer:
            for event in producer.stream(job_id):
                assert event.start == len(token_ids)
                token_ids += event.token_ids
                text += event.text
                self.output = token_ids, text

    def received(self) -> tuple[list[int], str]:
        """All that was said, once the job has ended."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.output


def lose_the_primary(service: Watched, job_ids: list[JobId]) -> list[int]:
    """Kill the primary when the replica has fewer tokens than it has acknowledged; returns how many the replica has."""
    pair = service.pair
    with pair.primary.client() as primary, pair.replica.client() as replica:
        wait_until(lambda: all(num_on_channel(primary, one) >= NUM_KEPT for one in job_ids), "they speak")
        pair.cut_off()
        kept = [num_on_channel(replica, one) for one in job_ids]
        assert min(kept) > 0, "the replica follows"
        wait_until(lambda: all(num_on_channel(primary, one) >= NUM_SAID for one in job_ids), "they speak on")
        assert [num_on_channel(replica, one) for one in job_ids] == kept
        pair.primary.kill()
    return kept


class TestGivenAReplicaThatIsBehind:
    def test_when_the_primary_dies_in_mid_job_then_readers_get_every_token_once(self, service: Watched) -> None:
        asks = [Ask(options=JobOptions(max_tokens=NUM_TOKENS, n=1 + i % 2), seed=i) for i in range(6)]
        replica = service.pair.replica.client()
        with ExitStack() as stack, replica:
            for _ in range(2):
                stack.enter_context(running_worker(service.url, model__path=SLOW, beat__every_s=1.0, beat__life_s=4.0))
            with service.pair.primary.client() as primary:
                job_ids = submit_all(primary, asks)
            listeners = [Listener(service.url, job_id) for job_id in job_ids]

            kept = lose_the_primary(service, job_ids)
            began_s = time.monotonic()
            wait_until(lambda: num_on_channel(replica, job_ids[0]) > kept[0], "somebody speaks to the new primary")
            took_s = time.monotonic() - began_s
            wait_for_ends(replica, job_ids)

            assert max(kept) < NUM_SAID
            assert took_s < TAKEOVER_S
            check_every_token_once(replica, dict(zip(job_ids, asks, strict=True)))
            assert [listener.received() for listener in listeners] == [expected_tokens(ask)[0] for ask in asks]
            assert {field_of(replica, one, "attempt") for one in job_ids} == {"1"}, "a failover moves no lease"
            check_nothing_is_left(replica)

    @pytest.mark.long
    def test_when_a_worker_dies_with_it_then_another_continues_from_the_replica(
        self, service: Watched, tmp_path: Path
    ) -> None:
        asks = [Ask(options=JobOptions(max_tokens=NUM_TOKENS), seed=i) for i in range(8)]
        history = f"sqlite:///{tmp_path / 'history.db'}"
        with worker_pool(service.url, tmp_path) as workers, service.pair.replica.client() as replica:
            crowd = workers.start_all(3, MODEL=SLOW, RECORDER="true", DATABASE_URL=history, MAX_NUM_SEQS="4")
            with service.pair.primary.client() as primary:
                job_ids = submit_all(primary, asks)
            kept = lose_the_primary(service, job_ids)
            busiest = max(crowd, key=lambda worker: worker.output.count("job taken"))
            busiest.kill()
            wait_for_ends(replica, job_ids)

            assert max(kept) < NUM_SAID
            check_every_token_once(replica, dict(zip(job_ids, asks, strict=True)))
            check_nothing_is_left(replica)
            attempts = [int(field_of(replica, one, "attempt") or 0) for one in job_ids]
            assert sorted(set(attempts)) == [1, 2], "the dead worker's jobs were taken over, and no others"
            with Producer(service.url, database_url=history) as producer:
                wait_until(lambda: [row.state for row in producer.jobs()] == ["done"] * len(asks), "all are recorded")


class TestGivenProducersWhileNobodyIsPrimary:
    async def test_when_they_submit_then_they_wait_for_the_new_one_and_the_jobs_are_done(
        self, service: Watched
    ) -> None:
        async with AsyncProducer(service.url) as aproducer:
            with running_worker(service.url), Producer(service.url) as producer:
                accepted = [producer.submit("before", durability="replica:1")]
                accepted.append(await aproducer.submit("before", durability="replica:1"))
                service.pair.primary.kill()

                accepted.append(producer.submit("during"))
                accepted.append(await aproducer.submit("later"))
                answers = list(producer.submit_many(["many"] * 300, max_tokens=5))

                accepted += [answer for answer in answers if isinstance(answer, Receipt)]
                assert len(accepted) == 304
                assert {outcome.view.state for outcome in producer.results(accepted) if outcome.view} == {"done"}


class TestGivenASentinelWhoseServersAreSilent:
    """It knows no replica that it could promote."""

    def test_when_the_network_suite_asks_it_then_the_primary_is_in_doubt_until_it_answers(self) -> None:
        with watched() as service, redis.Redis(port=service.sentinel_port) as client:
            sentinel: Any = client  # Any: redis-py's commands are partly untyped
            wait_until(lambda: takes_for_up(sentinel), "all is well")
            for server in (service.pair.replica, service.pair.primary):
                server.freeze()

            wait_until(lambda: not takes_for_up(sentinel), "the primary is in doubt")

            assert sentinel.sentinel_master(SERVICE)["port"] == service.pair.primary.port
            for server in (service.pair.replica, service.pair.primary):
                server.thaw()
            wait_until(lambda: takes_for_up(sentinel), "a primary is up")
