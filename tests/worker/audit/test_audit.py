"""Each kind of disagreement, made by hand: found, named, repaired where that can be, and gone at the second audit."""

from collections.abc import Callable, Generator

import pytest
from sqlalchemy.engine import Engine

from sluice.protocol.calls import LeasedJob, Ok
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from sluice.worker.errors import ConfigError
from tests.protocol.driving import Queue, Worker, ending, new_job, tokens
from tests.servers import RedisServer
from tests.worker.audit.audits import Scene


def scene_on(server: RedisServer, history: Engine) -> Generator[Scene]:
    """A busy queue that its history agrees with: jobs waiting, running, returned, not due, done, failed, cancelled."""
    with server.client() as client:
        queue = Queue(client)
        queue.stop_clock()
        queue.configure(keep_prompts="full")
        worker = queue.worker("W")
        for name in ("done", "failed", "running", "returned"):
            queue.add(name)
        done, failed, running, returned = worker.pull().jobs
        worker.advance(ending(done, 0, 2), ending(failed, 0, 1, state=JobState.FAILED), tokens(running, 0, 3))
        worker.give_back(returned)
        queue.add("queued")
        queue.add("other", tenant="u", priority=3)
        queue.add("delayed", not_before_ms=queue.now_ms + 60_000)
        queue.cancel(queue.add("cancelled"))
        scene = Scene(server, queue, history)
        scene.record()
        yield scene


@pytest.fixture
def scene(valkey: RedisServer, history: Engine) -> Generator[Scene]:
    """On each database."""
    yield from scene_on(valkey, history)


@pytest.fixture
def any_scene(any_redis: RedisServer, sqlite_history: Engine) -> Generator[Scene]:
    """On each server."""
    yield from scene_on(any_redis, sqlite_history)


@pytest.fixture
def one_scene(valkey: RedisServer, sqlite_history: Engine) -> Generator[Scene]:
    """On Valkey and SQLite alone."""
    yield from scene_on(valkey, sqlite_history)


def job(name: str) -> JobId:
    return JobId(f"0.t.{name}")


QUEUED, RUNNING, DONE = job("queued"), job("running"), job("done")
Break = Callable[[Queue], object]


def lose_entry(queue: Queue) -> None:
    about = queue.fields("t", "queued")
    queue.client.xdel(queue.keys.key("lane", about["lane"]), about["entry"])


def lose_hash(queue: Queue, name: str) -> None:
    queue.client.delete(queue.keys.key("job", "t", name))


def lease(queue: Queue, job_id: JobId, owner: str) -> None:
    packed = next(iter(queue.client.hgetall(queue.keys.key("held", "W")).values()))
    queue.client.hset(queue.keys.key("held", owner), job_id, packed)


def add_foreign_entry(queue: Queue) -> None:
    fields = {"job": "0.t.nobody", "at": 3}
    queue.client.xadd(queue.keys.key("lane", "0", "t"), fields, id="9999999999999-1")


def drift(queue: Queue, name: str) -> None:
    queue.client.hincrby(queue.keys.key("counters"), name, 3)


def set_depth(queue: Queue, lane: str, text: str) -> None:
    queue.client.hset(queue.keys.key("depth"), lane, text)


WITHIN_THE_QUEUE: dict[str, tuple[Break, set[tuple[str, str]]]] = {
    "an entry is gone": (
        lose_entry,
        {("queued_nowhere", QUEUED)},
    ),
    "a whole lane is gone": (
        lambda queue: queue.client.delete(queue.keys.key("lane", "3", "u")),
        {("queued_nowhere", "0.u.other")},
    ),
    "a job that is not due is in no set": (
        lambda queue: queue.client.zrem(queue.keys.key("delayed"), job("delayed")),
        {("queued_nowhere", job("delayed"))},
    ),
    "a job that is not due has no timer": (
        lambda queue: queue.client.zrem(queue.keys.key("timers"), f"not_before|{job('delayed')}"),
        {("never_due", job("delayed"))},
    ),
    "a job waits twice": (
        lambda queue: queue.client.zadd(queue.keys.key("suspects"), {QUEUED: 1}),
        {("queued_twice", QUEUED)},
    ),
    "a waiting job has an owner": (lambda queue: lease(queue, QUEUED, "W"), {("queued_but_leased", QUEUED)}),
    "another worker holds a running job": (lambda queue: lease(queue, RUNNING, "X"), {("leased_twice", RUNNING)}),
    "a running job is not held": (
        lambda queue: queue.client.hdel(queue.keys.key("held", "W"), RUNNING),
        {("running_for_nobody", RUNNING)},
    ),
    "a running job's owner is not known": (
        lambda queue: queue.client.zrem(queue.keys.key("alive"), "W"),
        {("running_for_nobody", RUNNING)},
    ),
    "an ended job has a lease": (lambda queue: lease(queue, DONE, "W"), {("ended_but_leased", DONE)}),
    "an ended job waits": (
        lambda queue: queue.client.zadd(queue.keys.key("suspects"), {DONE: 1}),
        {("ended_but_waiting", DONE)},
    ),
    "a done job is in the dead set": (
        lambda queue: queue.client.zadd(queue.keys.key("dead"), {DONE: queue.now_ms}),
        {("dead_but_not_failed", DONE)},
    ),
    "a lease is of nothing": (
        lambda queue: lease(queue, job("never"), "W"),
        {("no_such_job", job("never"))},
    ),
    "an entry has no job": (
        add_foreign_entry,
        {("entry_without_job", "0:t 9999999999999-1")},
    ),
    "a lane is not listed": (
        lambda queue: queue.client.zrem(queue.keys.key("heads", "3"), "u"),
        {("lane_unlisted", "0: lane 3:u")},
    ),
    "waiting jobs are miscounted": (
        lambda queue: drift(queue, "waiting_jobs"),
        {("counter", "0: waiting_jobs"), ("equation", "0: submitted")},
    ),
    "running jobs are miscounted": (
        lambda queue: drift(queue, "running_jobs"),
        {("counter", "0: running_jobs"), ("equation", "0: submitted")},
    ),
    "tokens are miscounted": (lambda queue: drift(queue, "waiting_tokens"), {("counter", "0: waiting_tokens")}),
    "bytes are miscounted": (lambda queue: drift(queue, "waiting_bytes"), {("counter", "0: waiting_bytes")}),
    "submitted jobs are miscounted": (lambda queue: drift(queue, "submitted"), {("equation", "0: submitted")}),
    "a lane's jobs are miscounted": (
        lambda queue: set_depth(queue, "3:u", "7 30 1 30 0 0"),
        {("counter", "0: lane 3:u jobs")},
    ),
    "a lane's tokens are miscounted": (
        lambda queue: set_depth(queue, "3:u", "1 77 1 30 0 0"),
        {("counter", "0: lane 3:u tokens")},
    ),
}  # fmt: skip


def ended(queue: Queue) -> set[str]:
    """Names of all jobs that have ended after the rest was pulled and done, once each."""
    queue.pass_time(120_000)
    worker, names = queue.worker("Z"), set[str]()
    while pulled := worker.pull().jobs:
        for one in pulled:
            finish(worker, one)
            names.add(one.id.split(".")[2])
    return names


def finish(worker: Worker, one: LeasedJob) -> None:
    """Send its end from where it is."""
    assert worker.advance(ending(one, one.published[0], 1)) == [Ok()]


class TestGivenAQueueThatItsHistoryAgreesWith:
    def test_when_audited_then_nothing_is_found_and_all_sums_are_reported(self, any_scene: Scene) -> None:
        report = any_scene.audit()

        assert report.findings == []
        assert dict(report.counters) == {
            "submitted": 8, "done": 1, "failed": 1, "cancelled": 1, "expired": 0, "queued": 4, "running": 1,
        }  # fmt: skip
        assert report.history == {"done": 1, "failed": 1, "cancelled": 1, "queued": 4, "running": 1}
        assert report.jobs == report.history

    def test_when_repaired_though_all_is_well_then_nothing_changes(self, one_scene: Scene) -> None:
        before = {name: one_scene.queue.client.dump(one_scene.queue.keys.key(name)) for name in one_scene.queue.names()}

        assert one_scene.repair() == {}

        after = {name: one_scene.queue.client.dump(one_scene.queue.keys.key(name)) for name in one_scene.queue.names()}
        assert after == before


class TestGivenNamesAndNumbersOfNoClient:
    """Another user wrote them into the keys that it may write."""

    @pytest.fixture
    def foreign(self, one_scene: Scene) -> Scene:
        client, key = one_scene.queue.client, one_scene.queue.keys.key
        for lane in (":t", "x:t", "0:a b", f"0:{'t' * 300}", "10:t"):
            client.xadd(key("lane", lane), {"x": "1"})
        client.xadd(key("lane", "9:t"), {"x": "1"}, id=f"{2**64 - 1}-{2**64 - 1}")
        client.hset(key("depth"), mapping={b"\xff": b"\xff", "x": "5 x", "3:u": "x y z"})
        client.hset(key("counters"), mapping={"waiting_jobs": "x", "submitted": "9" * 5000, b"\xff": b"\xff"})
        client.zadd(key("heads", 0), {b"\xff": 1, "a b": 1})
        return one_scene

    def test_when_audited_and_repaired_then_all_of_them_is_named_once(self, foreign: Scene) -> None:
        assert foreign.found()
        foreign.repair()
        foreign.repair()

        assert foreign.found() == {}


class TestGivenAQueueOfTwoPartitions:
    def test_when_something_is_wrong_in_one_then_it_is_found_and_mended_there(
        self, valkey: RedisServer, sqlite_history: Engine
    ) -> None:
        with valkey.client() as client:
            queues = [Queue(client, QueueKeys("q", number)) for number in range(2)]
            for number, queue in enumerate(queues):
                queue.submit(*(new_job(name, id=JobId(f"{number}.t.{name}")) for name in ("one", "two")))
            scene = Scene(valkey, queues[0], sqlite_history, partitions=2)
            scene.record()
            assert (scene.found(), scene.audit().jobs["queued"]) == ({}, 4)
            about = queues[1].fields("t", "two")
            client.xdel(queues[1].keys.key("lane", "0:t"), about["entry"])
            drift(queues[1], "done")

            assert set(scene.found()) == {("queued_nowhere", "1.t.two")}
            scene.repair()

            assert scene.found() == {}
            assert [len(queue.worker("W").pull().jobs) for queue in queues] == [2, 2]


class TestGivenWorkersOfTwoPartitions:
    @pytest.fixture
    def scene(self, valkey: RedisServer, sqlite_history: Engine) -> Generator[Scene]:
        """Something is wrong in the second."""
        with valkey.client() as client:
            queues = [Queue(client, QueueKeys("q", number)) for number in range(2)]
            for number, queue in enumerate(queues):
                queue.configure(partitions=2)
                queue.submit(new_job("one", id=JobId(f"{number}.t.one")))
            scene = Scene(valkey, queues[0], sqlite_history, partitions=2, is_told=False)
            scene.record()
            client.delete(queues[1].keys.job(JobId("1.t.one")))
            yield scene

    def test_when_the_audit_is_not_told_then_it_looks_into_both(self, scene: Scene) -> None:
        assert "1.t.one" in {subject for _, subject in scene.found()}

    def test_when_it_is_told_otherwise_then_it_is_refused(self, scene: Scene) -> None:
        scene.partitions, scene.is_told = 1, True

        with pytest.raises(ConfigError, match="serve 2 partitions, and this client was made for 1"):
            scene.audit()


class TestGivenAQueueThatContradictsItself:
    @pytest.mark.parametrize("name", WITHIN_THE_QUEUE)
    def test_when_audited_and_repaired_then_it_is_consistent_and_every_job_ends_once(
        self, any_scene: Scene, name: str
    ) -> None:
        breaks, expected = WITHIN_THE_QUEUE[name]
        breaks(any_scene.queue)

        assert set(any_scene.found()) == expected
        any_scene.repair()
        any_scene.record()

        assert any_scene.found() == {}
        assert ended(any_scene.queue) == {"queued", "other", "delayed", "returned", "running"}
        any_scene.record()
        report = any_scene.audit()
        assert (report.findings, report.history) == ([], {"done": 6, "failed": 1, "cancelled": 1})
