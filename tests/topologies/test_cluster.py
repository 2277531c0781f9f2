"""A queue over the three shards of a real Cluster: clients, workers, recorder, and a shard that dies and returns."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from sluice.engine.request import Request
from sluice.history.database import open_database
from sluice.history.writer import HistoryWriter
from sluice.producer import AsyncProducer, Producer, Receipt
from sluice.producer.errors import InvalidPrompt, InvalidSetting
from sluice.protocol.calls import LeasedJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.schedules.schedule import ScheduleKeys, pack_schedule, read_schedule
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobOptions, JobSpec, encode_prompt
from sluice.worker.audit.command import AuditOptions, run_audit
from sluice.worker.audit.findings import Kind
from sluice.worker.callbacks.command import run_callbacks
from sluice.worker.config import load_config
from sluice.worker.connection.clients import connect
from sluice.worker.errors import ConfigError
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.leases import Leases
from sluice.worker.model.translate import Translator
from sluice.worker.recorder.migrate import migrate
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from sluice.worker.serve.give_back import ReturnQueue
from sluice.worker.serve.preparation import Preparation
from tests.clusters import Cluster, redis_cluster, wait_until_joined
from tests.end_to_end.processes import worker_pool
from tests.end_to_end.test_worker_records import ended, rows_of
from tests.integration.jobs import (
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    field_of,
    num_on_channel,
    read_channel,
    state_of,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.integration.test_exchange_rounds import ROOM, Running
from tests.integration.workers import running_worker
from tests.protocol.driving import Queue
from tests.servers import Flavor, RedisServer, binary_of, how_to_get, redis_server

PARTITIONS = 3


@pytest.fixture(scope="module", params=["valkey", pytest.param("redis-7.0", marks=pytest.mark.long)])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    flavor: Flavor = request.param
    if binary_of(flavor) is None:
        pytest.skip(how_to_get(flavor))
    with redis_cluster(flavor) as made:
        yield made


class Partitioned:
    """A fresh queue with a partition on each shard."""

    def __init__(self, cluster: Cluster, skip: int) -> None:
        self.cluster = cluster
        self.name = cluster.queue_over_all(PARTITIONS, skip=skip)
        self.keys = [QueueKeys(self.name, number) for number in range(PARTITIONS)]
        self.client: Any = connect(cluster.url, timeout_s=5)

    def settings(self, **more: Any) -> dict[str, Any]:  # Any: values of settings
        return {"queue__name": self.name, "queue__partitions": PARTITIONS, **more}

    def submit(self, ask: Ask, count: int) -> dict[QueueKeys, dict[JobId, Ask]]:
        """So many jobs on each partition."""
        asks = [Ask(options=ask.options, seed=seed) for seed in range(count)]
        return {keys: dict(zip(submit_all(self.client, asks, keys=keys), asks, strict=True)) for keys in self.keys}

    def check(self, jobs: dict[QueueKeys, dict[JobId, Ask]]) -> None:
        """Wait for all ends; every token is there once, and nothing is left."""
        for keys, asked in jobs.items():
            wait_for_ends(self.client, list(asked), keys=keys, patience_s=40)
            check_every_token_once(self.client, asked, keys=keys)


NUMBERS = count(0, 100)
"""Where the names of queues begin: no two tests share one."""


@pytest.fixture
def queue(cluster: Cluster) -> Iterator[Partitioned]:
    made = Partitioned(cluster, skip=next(NUMBERS))
    yield made
    made.client.disconnect()


class TestGivenAQueueOverThreeShards:
    def test_when_a_worker_serves_it_then_every_shard_has_jobs_and_no_token_is_lost(self, queue: Partitioned) -> None:
        with running_worker(queue.cluster.url, **queue.settings()):
            jobs = queue.submit(Ask(options=JobOptions(max_tokens=20, ignore_eos=True)), 4)
            queue.check(jobs)

        for keys, asked in jobs.items():
            with queue.cluster.shard_of(keys).client() as shard:
                assert all(shard.exists(keys.job(job_id)) for job_id in asked)
                check_nothing_is_left(shard, keys=keys)

    def test_when_jobs_come_through_the_client_then_they_stream_and_have_results(self, queue: Partitioned) -> None:
        with (
            running_worker(queue.cluster.url, **queue.settings()),
            Producer(queue.cluster.url, queue=queue.name, partitions=PARTITIONS) as producer,
        ):
            answers = list(producer.submit_many(map(str, range(24)), max_tokens=9, ignore_eos=True))
            receipts = [answer for answer in answers if isinstance(answer, Receipt)]
            streamed = sum(len(event.token_ids) for event in producer.stream_many(receipts))
            alone = sum(len(event.token_ids) for event in producer.stream(receipts[0], timeout_s=20))

            assert {job.id[0] for job in receipts} == {"0", "1", "2"}
            assert (streamed, alone) == (24 * 9, 9)
            assert len(producer.result(receipts[1], timeout_s=20).choices[0].token_ids) == 9
            assert producer.queues()[queue.name] == PARTITIONS
            assert [part.totals["done"] for part in producer.queue()] == [
                sum(job.id.startswith(f"{number}.") for job in receipts) for number in range(PARTITIONS)
            ]

    async def test_when_they_come_through_the_async_client_then_it_does_the_same(self, queue: Partitioned) -> None:
        url = queue.cluster.url
        with running_worker(url, **queue.settings()):
            async with AsyncProducer(url, queue=queue.name, partitions=PARTITIONS) as producer:
                answers = [
                    one async for one in producer.submit_many(map(str, range(24)), max_tokens=9, ignore_eos=True)
                ]
                receipts = [answer for answer in answers if isinstance(answer, Receipt)]
                streamed = [len(event.token_ids) async for event in producer.stream_many(receipts)]

                assert sum(streamed) == 24 * 9
                assert len((await producer.result(receipts[0], timeout_s=20)).choices[0].token_ids) == 9
                assert (await producer.queues())[queue.name] == PARTITIONS

    def test_when_no_job_can_be_encoded_then_each_has_its_error(self, queue: Partitioned) -> None:
        with Producer(queue.cluster.url, queue=queue.name, partitions=PARTITIONS) as producer:
            answers = list(producer.submit_many(["", ""]))

        assert [type(answer) for answer in answers] == [InvalidPrompt, InvalidPrompt]


class TestGivenAShardWithoutAFile:
    def test_when_its_file_is_off_then_no_submit_with_durability_aof_is_confirmed(self, queue: Partitioned) -> None:
        for keys in queue.keys:
            with (
                queue.cluster.shard_of(keys).client() as shard,
                Producer(queue.cluster.url, queue=queue.name, partitions=PARTITIONS) as producer,
            ):
                sound = list(producer.submit_many(map(str, range(24)), durability="aof"))
                shard.config_set("appendonly", "no")
                try:
                    answers = list(producer.submit_many(map(str, range(24)), durability="aof"))
                finally:
                    shard.config_set("appendonly", "yes")

                assert all(isinstance(one, Receipt) for one in sound)
                assert not any(isinstance(one, Receipt) for one in answers)
                assert "append-only file is off" in str(answers[0])


class TestGivenAShardThatStandsStill:
    """It keeps its connections: only a timeout reveals the outage."""

    STEP_S, TIMEOUT_S = 0.01, 1.0

    @pytest.mark.long
    def test_when_other_shards_serve_then_they_lose_one_timeout_and_its_jobs_resume(self, queue: Partitioned) -> None:
        beats = {"beat__every_s": 1.0, "beat__life_s": 4.0}
        model = f"null?step_s={self.STEP_S}"
        settings = queue.settings(model__path=model, redis__timeout_s=self.TIMEOUT_S, **beats)
        with running_worker(queue.cluster.url, **settings):
            jobs = queue.submit(Ask(options=JobOptions(max_tokens=700, ignore_eos=True)), 2)
            still, *well = queue.keys
            wait_until(
                lambda: all(_least_spoken(queue.client, keys, asked) >= 30 for keys, asked in jobs.items()), "all speak"
            )

            shard = queue.cluster.shard_of(still)
            shard.freeze()
            try:
                gaps_s = {job_id: self._gaps_s(queue, keys, job_id) for keys in well for job_id in jobs[keys]}
            finally:
                shard.thaw()

            for longest_s, second_s, *_ in (sorted(gaps, reverse=True) for gaps in gaps_s.values()):
                assert longest_s < 2 * self.TIMEOUT_S, "it waits for one answer in vain"
                assert second_s < self.TIMEOUT_S / 2, "and never again"
            wait_until_joined(queue.cluster)
            queue.check(jobs)
            for keys, asked in jobs.items():
                assert {field_of(queue.client, job_id, "attempt", keys=keys) for job_id in asked} == {"1"}

    def test_when_one_of_its_jobs_resumes_then_others_start_first_and_it_after_return(self, queue: Partitioned) -> None:
        context = replace(Running(queue.cluster.url).context, partitions=tuple(queue.keys))
        jobs = [_resumed(keys) for keys in queue.keys]
        for job in jobs:
            context.leases.take(job.keys, 1, [job])
        translator = Translator(encode=_encode, template=None, validate=lambda _: None, model="m")
        preparation = Preparation(connect(queue.cluster.url, timeout_s=0.5), context, translator)
        taken: list[Request] = []

        def ready() -> list[str]:
            taken.extend(context.mailbox.new_requests(ROOM, wait_s=0))
            return [request.id for request in taken]

        shard = queue.cluster.shard_of(jobs[0].keys)
        shard.freeze()
        try:
            preparation.start()
            preparation.put(jobs)
            wait_until(lambda: len(ready()) == 2, "the others are prepared")
        finally:
            shard.thaw()

        wait_until(lambda: len(ready()) == 3, "so is the first")
        assert set(ready()[:2]) == {job.request_id for job in jobs[1:]}
        context.unavailable.stop()
        preparation.stop()

    def test_when_jobs_are_handed_back_then_its_own_follow_once_it_returns(self, queue: Partitioned) -> None:
        context = replace(Running(queue.cluster.url).context, partitions=tuple(queue.keys))
        for keys in queue.keys:
            submit_all(queue.client, [Ask()], keys=keys)
            leased = Queue(queue.client, keys).worker(context.incarnation).take()
            context.leases.take(keys, 1, [context.leases.new_job(leased, keys, None)])
        still, *well = context.leases.all()
        returns = ReturnQueue(connect(queue.cluster.url, timeout_s=0.5), context)

        shard = queue.cluster.shard_of(still.keys)
        shard.freeze()
        try:
            returns.add_unstarted()
            returns.turn()
            assert context.leases.all() == [still]
            for job in well:
                with queue.cluster.shard_of(job.keys).client() as client:
                    assert state_of(client, job.id, keys=job.keys) is JobState.QUEUED
        finally:
            shard.thaw()

        def is_drained() -> bool:
            returns.turn()
            return not context.leases.all()

        wait_until(is_drained, "the last goes back")
        assert state_of(queue.client, still.id, keys=still.keys) is JobState.QUEUED
        context.unavailable.stop()

    def _gaps_s(self, queue: Partitioned, keys: QueueKeys, job_id: JobId) -> list[float]:
        """Between one entry of a job and the next, once it has ended: what is said meanwhile becomes one entry."""
        with queue.cluster.shard_of(keys).client() as client:
            wait_for_ends(client, [job_id], keys=keys)
            return [len(entry.token_ids) * self.STEP_S for entry in read_channel(client, job_id, keys=keys)]


def _encode(text: str, *, add_special_tokens: bool) -> list[int]:
    return [len(text) + add_special_tokens]


def _resumed(keys: QueueKeys) -> HeldJob:
    """A job of which another worker published three tokens."""
    leased = LeasedJob(
        id=JobId(f"{keys.partition}.t.a"), epoch=2, attempt=2, priority=0, spec=b"", payload=encode_prompt("hello"),
        seed=1, choices=1, submitted_ms=0, pulled_ms=0, deadline_ms=None, prompt_tokens=1, published=(3,),
        ended=(False,), fingerprint=None, fits=True,
    )  # fmt: skip
    return Leases().new_job(leased, keys, JobSpec())


class TestGivenAWorkerProcessWithItsRecorder:
    @pytest.mark.long
    def test_when_a_shard_is_killed_and_returns_then_others_continue_and_nothing_is_lost(
        self, queue: Partitioned, tmp_path: Path
    ) -> None:
        history = tmp_path / "history.db"
        with worker_pool(queue.cluster.url, tmp_path) as workers:
            workers.start_all(
                1, QUEUE=queue.name, PARTITIONS=str(PARTITIONS), RECORDER="true", DATABASE_URL=f"sqlite:///{history}"
            )
            jobs = queue.submit(Ask(options=JobOptions(max_tokens=300, ignore_eos=True)), 3)
            down, *well = queue.keys
            wait_until(
                lambda: all(_least_spoken(queue.client, keys, asked) >= 30 for keys, asked in jobs.items()), "all speak"
            )

            shard = queue.cluster.shard_of(down)
            shard.kill()
            for keys in well:
                with queue.cluster.shard_of(keys).client() as other:
                    # A slow reader finds them at their end.
                    spoken = partial(_least_spoken, other, keys, jobs[keys])
                    goal = min(spoken() + 20, 300)
                    wait_until(lambda spoken=spoken, goal=goal: spoken() >= goal, "its jobs resume")
                    new = submit_all(other, [Ask(options=JobOptions(max_tokens=5))], keys=keys)
                    wait_for_ends(other, new, keys=keys)
            shard.start()
            wait_until_joined(queue.cluster)

            queue.check(jobs)
            every = [job_id for asked in jobs.values() for job_id in asked]
            wait_until(lambda: ended(rows_of(history), every), "every row is there")
            assert [rows_of(history)[job_id]["output_tokens"] for job_id in every] == [300] * len(every)

    @pytest.mark.long
    def test_when_the_worker_is_killed_then_another_goes_on_at_the_next_token(
        self, queue: Partitioned, tmp_path: Path
    ) -> None:
        with worker_pool(queue.cluster.url, tmp_path) as workers:
            settings = {"QUEUE": queue.name, "PARTITIONS": str(PARTITIONS)}
            first, _ = workers.start_all(2, **settings)
            jobs = queue.submit(Ask(options=JobOptions(max_tokens=120, ignore_eos=True)), 4)
            wait_until(
                lambda: all(_least_spoken(queue.client, keys, asked) >= 10 for keys, asked in jobs.items()), "all speak"
            )

            first.kill()

            queue.check(jobs)


def _least_spoken(client: Any, keys: QueueKeys, asked: dict[JobId, Ask]) -> int:  # Any: a redis-py client
    return min(num_on_channel(client, job_id, keys=keys) for job_id in asked)


class TestGivenAHistory:
    def test_when_it_is_audited_then_every_shard_is_looked_at(self, queue: Partitioned, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path}/history.db"
        history = open_database(url, is_writer=True)
        migrate(history)
        jobs = queue.submit(Ask(), 2)
        settings = RecorderSettings(queues=(queue.name,), name="r1", partitions=PARTITIONS)
        Recorder(queue.client, HistoryWriter(history), settings).drain()
        history.dispose()
        flags = {"redis.url": queue.cluster.url, "history.database_url": url, "queue.name": queue.name}
        config = load_config({}, flags={**flags, "queue.partitions": PARTITIONS})

        report = run_audit(config, {}, AuditOptions(pause_s=0, history_s=0))
        assert (report.findings, report.jobs["queued"]) == ([], 2 * PARTITIONS)

        keys = queue.keys[-1]
        lost = next(iter(jobs[keys]))
        queue.client.delete(keys.job(lost))
        found = {
            (one.kind, one.subject) for one in run_audit(config, {}, AuditOptions(pause_s=0, history_s=0)).findings
        }
        assert (Kind.FORGOTTEN, lost) in found


class TestGivenASlotThatMoved:
    def test_when_the_clients_hear_of_it_with_their_next_call_then_they_follow(self, queue: Partitioned) -> None:
        keys = queue.keys[0]
        with (
            Producer(queue.cluster.url, queue=queue.name) as producer,
            Producer(queue.cluster.url, queue=queue.name) as other,
        ):
            producer.queue()
            assert queue.client.exists(keys.notifications) == 0
            target = _move_slot(queue.cluster, keys)

            job = producer.submit("hello")
            many = list(other.submit_many(["a", "b"]))

            with target.client() as shard:
                assert shard.exists(keys.job(job.id)) == 1
                assert all(isinstance(one, Receipt) and shard.exists(keys.job(one.id)) for one in many)
            assert queue.client.exists(keys.job(job.id)) == 1


def _move_slot(cluster: Cluster, keys: QueueKeys) -> RedisServer:
    """Give the slot of an empty partition to another shard, and say so to all."""
    slot, source = key_slot(keys.notifications.encode()), cluster.shard_of(keys)
    target = next(server for server in cluster.servers if server is not source)
    with target.client() as client:
        name: Any = client.execute_command("CLUSTER", "MYID")
    for server in (target, source, *cluster.servers):
        with server.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name)
    return target


class TestGivenWebhooksAndACluster:
    def test_when_rq_would_use_it_then_callbacks_do_not_start_and_name_the_setting(self) -> None:
        config = load_config({}, flags={"redis.url": "redis+cluster://127.0.0.1:1"})

        with pytest.raises(ConfigError, match="SLUICE_CALLBACKS_REDIS_URL"):
            run_callbacks(config, {})


class TestGivenAServerThatIsNoCluster:
    async def test_when_it_is_spoken_to_as_one_then_that_is_said(self) -> None:
        with redis_server("valkey", with_tcp=True) as server:
            url = server.tcp_url.replace("redis://", "redis+cluster://")

            with Producer(url) as producer, pytest.raises(InvalidSetting, match="redis://"):
                producer.submit("hello")
            async with AsyncProducer(url) as awaiting:
                with pytest.raises(InvalidSetting, match="redis://"):
                    await awaiting.submit("hello")
            with pytest.raises(ConfigError, match="redis://"):
                connect(url, timeout_s=5).ping()


class TestGivenAChainOnACluster:
    """It is on the shard of partition 0, its jobs and those for which they wait on others."""

    def test_when_those_are_done_then_a_worker_releases_its_jobs(self, cluster: Cluster, queue: Partitioned) -> None:
        with Producer(cluster.url, queue=queue.name, partitions=PARTITIONS) as producer:
            parents = [
                producer.submit("parent", job_id=JobId(f"{i}.default.parent"), max_tokens=2) for i in range(PARTITIONS)
            ]
            children = list(producer.submit_many(["{{outputs[1]}}"] * 8, after=parents, max_tokens=3))
            jobs = [child for child in children if isinstance(child, Receipt)]
            unneeded = producer.submit("unneeded", after=jobs[:1], max_tokens=1)
            producer.cancel(unneeded)
            with running_worker(cluster.url, queue__name=queue.name, queue__partitions=PARTITIONS):
                assert [producer.result(job, timeout_s=30).usage.output_tokens for job in jobs] == [3] * 8
                wait_until(lambda: producer.status(unneeded).state is JobState.CANCELLED, "it is cancelled")
            assert producer.chains() == []


class TestGivenAScheduleOnACluster:
    """Its keys and all jobs of its runs are on the shard of partition 0."""

    def test_when_it_is_due_then_a_worker_runs_it(self, cluster: Cluster, queue: Partitioned) -> None:
        keys = ScheduleKeys(queue.keys[0])
        with Producer(cluster.url, queue=queue.name, partitions=PARTITIONS) as producer:
            producer.add_schedule("report", ["one", "two"], cron="* * * * *", max_tokens=3)
            rule = read_schedule("default.report", queue.client.hget(keys.schedules, "default.report"))
            due = replace(rule, created_s=rule.created_s - 60)
            queue.client.hset(keys.schedules, "default.report", pack_schedule(due))
            with running_worker(cluster.url, queue__name=queue.name, queue__partitions=PARTITIONS):
                wait_until(lambda: producer.schedule("report").last_run, "a worker runs it")
                run = producer.schedule("report").last_run
                assert run is not None
                jobs = [f"0.default.report-{int(run.timestamp())}{end}" for end in ("", "-1")]

                assert [producer.result(job, timeout_s=30).usage.output_tokens for job in jobs] == [3, 3]
                producer.remove_schedule("report")
