"""What an acknowledged job survives at each durability level: a killed server, a power failure, a failover.

docs/explanation/durability.md has one row for each class here.
"""

import itertools
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from sluice.producer import AsyncProducer, Producer, Receipt
from sluice.producer.bulk.run import BulkRun, BulkSettings
from sluice.producer.errors import DurabilityRefused, LessDurable, ProducerError
from sluice.producer.operations.submission import CALLS_PER_WAIT, SubmitAnswer
from sluice.protocol.limits import MAX_JOBS_PER_CALL
from tests.chaos.faults.power_failure import PowerSupply, powered_server
from tests.chaos.faults.replicated import Replicated, replicated
from tests.integration.jobs import wait_until
from tests.servers import FLAVORS, Flavor, RedisServer, binary_of, how_to_get, redis_server

ALWAYS = ("--appendfsync", "always")


def need(flavor: Flavor) -> None:
    """Skip what this machine lacks."""
    if binary_of(flavor) is None:
        pytest.skip(how_to_get(flavor))


def known(url: str, receipts: list[Receipt]) -> list[bool]:
    """Whether the queue still has each job."""
    with Producer(url) as producer:
        return [view is not None for view in producer.views(receipts)]


def submit_after_a_sync(power: PowerSupply, producer: Producer, durability: str) -> tuple[Receipt, Receipt]:
    """Two jobs: the first is on disk, the second is not yet (the server brings its file to disk once in a second)."""
    while True:
        synced = producer.submit("on disk", durability=durability)
        wait_until(lambda: power.num_unsynced_bytes() == 0, "the file is on disk")
        unsynced = producer.submit("not yet", durability=durability)
        if power.num_unsynced_bytes() > 0:
            return synced, unsynced


class TestGivenLevelMemory:
    def test_when_a_server_without_a_file_is_killed_then_what_it_acknowledged_is_gone(self) -> None:
        need("valkey")
        with redis_server("valkey") as server:
            with Producer(server.url, durability="memory") as producer:
                receipt = producer.submit("hello")
            server.restart(crash=True)

            assert known(server.url, [receipt]) == [False]

    def test_when_the_primary_dies_before_it_was_replicated_then_the_job_is_gone(self) -> None:
        with replicated() as pair:
            with Producer(pair.primary.url, durability="memory") as producer:
                before = producer.submit("replicated")
                wait_until(lambda: known(pair.replica.url, [before]) == [True], "it is replicated")
                pair.cut_off()
                after = producer.submit("not replicated")
            pair.fail_over_by_hand()

            assert known(pair.replica.url, [before, after]) == [True, False]


class TestGivenLevelAof:
    @pytest.mark.parametrize("flavor", FLAVORS)
    def test_when_the_server_is_killed_then_every_job_is_there(self, flavor: Flavor) -> None:
        need(flavor)
        with redis_server(flavor, is_durable=True) as server:
            with Producer(server.url, durability="aof") as producer:
                receipts = [producer.submit(f"prompt {i}") for i in range(100)]
            server.wait_until_written()
            server.restart(crash=True)

            assert all(known(server.url, receipts))

    def test_when_the_power_fails_then_what_was_not_on_disk_yet_is_gone(self) -> None:
        with powered_server("valkey") as power:
            with Producer(power.server.url) as producer:
                receipts = submit_after_a_sync(power, producer, "aof")
            lost_bytes = power.fail()
            power.server.start()

            assert lost_bytes > 0
            assert known(power.server.url, list(receipts)) == [True, False]


class TestGivenLevelFsync:
    @pytest.mark.parametrize("flavor", FLAVORS)
    def test_when_the_power_fails_amid_submits_then_every_acknowledged_job_is_there(self, flavor: Flavor) -> None:
        with powered_server(flavor, *ALWAYS) as power:
            receipts = list[Receipt]()

            def submit_one_by_one() -> None:
                with Producer(power.server.url, durability="fsync", patience_s=0) as producer:
                    for i in itertools.count():
                        # Without patience it waits a millisecond for the disk, which takes longer at times.
                        with suppress(LessDurable):
                            receipts.append(producer.submit(f"prompt {i}"))

            with until_it_fails(submit_one_by_one):
                wait_until(lambda: len(receipts) > 30, "many are acknowledged")
                power.fail()
            power.server.start()

            assert all(known(power.server.url, receipts))

    def test_when_power_fails_amid_a_bulk_submit_then_every_acknowledged_job_is_there(self) -> None:
        with powered_server("valkey", *ALWAYS) as power:
            receipts = list[SubmitAnswer]()

            def submit_many() -> None:
                with Producer(power.server.url, durability="fsync", patience_s=2) as producer:
                    receipts.extend(producer.submit_many(f"prompt {i}" for i in itertools.count()))

            with until_it_fails(submit_many):
                wait_until(lambda: len(receipts) > 0, "many are acknowledged")
                power.fail()
            power.server.start()

            accepted = [receipt for receipt in receipts if isinstance(receipt, Receipt)]
            assert len(accepted) == len(receipts) >= MAX_JOBS_PER_CALL * CALLS_PER_WAIT
            assert all(known(power.server.url, accepted))

    def test_when_the_server_syncs_every_second_then_it_is_refused_before_submitting(
        self, durable_valkey: RedisServer
    ) -> None:
        with Producer(durable_valkey.url) as producer:
            with pytest.raises(DurabilityRefused, match=r"`appendfsync` is everysec.*Set `appendfsync always`"):
                producer.submit("hello", durability="fsync")

            assert producer.queue()[0].waiting_jobs == 0

    def test_when_fsync_is_everysec_then_waitaof_returns_before_the_data_is_on_disk(self) -> None:
        """Why that is refused although the server has WAITAOF: Valkey 9.1 says yes too early."""
        with powered_server("valkey") as power, power.server.client() as client:
            with Producer(power.server.url) as producer:
                receipts = submit_after_a_sync(power, producer, "aof")
                client.incr("a write of this connection")
                assert client.execute_command("WAITAOF", 1, 0, 5000)[0] == 1
            power.fail()
            power.server.start()

            assert known(power.server.url, list(receipts)) == [True, False]


@pytest.fixture(scope="module", params=["valkey", *(pytest.param(one, marks=pytest.mark.long) for one in FLAVORS[1:])])
def pair(request: pytest.FixtureRequest) -> Generator[Replicated]:
    """One for the tests that only stop its replica for a while."""
    with replicated(request.param) as pair:
        yield pair


class TestGivenLevelReplica:
    @pytest.fixture
    def lagging(self, pair: Replicated) -> Iterator[Replicated]:
        """The replica is connected, and receives nothing."""
        pair.stop_replica()
        yield pair
        pair.resume_replica()

    def test_when_the_replica_lags_then_the_job_is_accepted_and_the_error_says_so(self, lagging: Replicated) -> None:
        with Producer(lagging.primary.url, durability="replica:1", patience_s=0.2) as producer:
            with pytest.raises(LessDurable, match=r"is accepted, but less durable than replica:1: 0 of 1") as caught:
                producer.submit("hello")

            assert isinstance(caught.value.receipt, Receipt)
            assert known(lagging.primary.url, [caught.value.receipt]) == [True]

    def test_when_a_job_is_submitted_again_then_its_first_write_is_waited_for(self, lagging: Replicated) -> None:
        # It is a duplicate, which writes nothing, on a connection that has written nothing.
        with Producer(lagging.primary.url) as producer:
            receipt = producer.submit("hello")
        with Producer(lagging.primary.url, patience_s=0.2) as producer, pytest.raises(LessDurable) as caught:
            producer.submit("hello", job_id=receipt.id, durability="replica:1")

        assert caught.value.job_id == receipt.id

    def test_when_a_file_is_submitted_once_more_after_a_doubt_then_each_line_is_one_job(
        self, lagging: Replicated, tmp_path: Path
    ) -> None:
        path = tmp_path / "lines.jsonl"
        path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
        settings = BulkSettings(path=str(path), batch="b", journal=tmp_path / "journal")
        with Producer(lagging.primary.url, durability="replica:1", patience_s=0.2) as producer:
            before = producer.queue()[0].waiting_jobs
            with (
                pytest.raises(LessDurable),
                BulkRun.opened(producer, settings, lambda _counts: None) as doubted,
            ):
                doubted.submit()
        lagging.resume_replica()
        with (
            Producer(lagging.primary.url, durability="replica:1") as producer,
            BulkRun.opened(producer, settings, lambda _counts: None) as again,
        ):
            again.submit()

            assert (again.counts.before, again.counts.accepted) == (2, 0)
            assert producer.queue()[0].waiting_jobs == before + 2

    async def test_when_many_are_submitted_then_each_hears_it_after_one_wait(self, lagging: Replicated) -> None:
        async with AsyncProducer(lagging.primary.url, durability="replica:1", patience_s=0.5) as producer:
            answers = [answer async for answer in producer.submit_many(f"prompt {i}" for i in range(1000))]

        assert {type(answer) for answer in answers} == {LessDurable}

    def test_when_more_replicas_are_asked_for_than_there_are_then_it_is_refused(self, pair: Replicated) -> None:
        refused = pytest.raises(DurabilityRefused, match="1 of 2 replicas follow it")

        with Producer(pair.primary.url) as producer, refused:
            producer.submit("hello", durability="replica:2")

    def test_when_the_primary_is_demoted_while_a_submit_waits_then_it_is_sent_again(self) -> None:
        with replicated() as pair, pair.primary.client() as client, ThreadPoolExecutor(1) as other_thread:
            with Producer(pair.primary.url, durability="replica:1") as producer:
                producer.submit("hello")
                pair.stop_replica()
                waiting = other_thread.submit(producer.submit, "hello")
                wait_until(lambda: client.info("clients")["blocked_clients"] == 1, "the submit waits")
                client.execute_command("REPLICAOF", "127.0.0.1", pair.replica.port)  # the server breaks the wait off
                client.execute_command("REPLICAOF", "NO", "ONE")
                pair.resume_replica()

                receipt = waiting.result(20)

            assert known(pair.replica.url, [receipt]) == [True]

    def test_when_the_primary_is_killed_then_the_replica_has_every_acknowledged_job(self) -> None:
        with replicated() as pair:
            receipts = list[Receipt]()

            def submit() -> None:
                with Producer(pair.primary.url, durability="replica:1", patience_s=0) as producer:
                    for i in itertools.count():
                        # Without patience it waits a millisecond for the replica, which takes longer at times.
                        with suppress(LessDurable):
                            receipts.append(producer.submit(f"prompt {i}"))

            with until_it_fails(submit):
                wait_until(lambda: len(receipts) > 200, "many are acknowledged")
                pair.fail_over_by_hand()

            assert all(known(pair.replica.url, receipts))


class until_it_fails:  # noqa: N801  # used as a context manager
    """Run these on threads until each ends by an error of the producer's: the server is gone."""

    def __init__(self, *runs: object) -> None:
        self._threads = [threading.Thread(target=self._run, args=(run,), daemon=True) for run in runs]
        self._ends: list[ProducerError] = []
        self._strange: list[BaseException] = []

    def _run(self, run: object) -> None:
        try:
            assert callable(run)
            run()
        except ProducerError as end:
            self._ends.append(end)
        except BaseException as error:  # noqa: BLE001  # the test raises it
            self._strange.append(error)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            error.add_note(f"What ended meanwhile: {self._ends!r}")
        for thread in self._threads:
            thread.join(20)
        assert self._strange == []
