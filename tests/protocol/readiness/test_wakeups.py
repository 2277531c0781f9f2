"""A notification wakes one worker: its pull acknowledges it, and wakes the next if it leaves jobs."""

import pytest

from sluice.protocol import calls
from sluice.protocol.calls import Notification
from tests.protocol.driving import Queue, Worker, check, short

pytestmark = pytest.mark.every_server

NO_ROOM = {"kv_tokens": 0, "prefill_tokens": 0, "sequences": 0}
GROUP = "workers"


def wake(queue: Queue) -> Notification:
    """Give the newest notification to a listening worker."""
    key = queue.keys.notifications
    queue.client.xgroup_create(key, GROUP, id="0", mkstream=True)
    ((_, entries),) = queue.client.xreadgroup(GROUP, "idle", {key: ">"})
    newest = entries[-1][0].decode()
    return Notification(newest, newest)


def written_after(queue: Queue, last: str) -> list[str]:
    """What each later notification says."""
    return [fields[b"e"].decode() for _, fields in queue.client.xrange(queue.keys.notifications, f"({last}", "+")]


def num_unacknowledged(queue: Queue) -> int:
    return queue.client.xpending(queue.keys.notifications, GROUP)["pending"]


class TestGivenAWokenWorker:
    @pytest.fixture
    def worker(self, queue: Queue) -> Worker:
        return queue.worker("A")

    def test_when_it_takes_all_then_it_acknowledges_and_wakes_nobody(self, queue: Queue, worker: Worker) -> None:
        queue.add("a")
        woken_by = wake(queue)

        assert short(worker.pull(woken_by=woken_by).jobs) == ["a"]

        assert num_unacknowledged(queue) == 0
        assert written_after(queue, woken_by.id) == []

    def test_when_its_room_is_full_then_it_wakes_the_next(self, queue: Queue, worker: Worker) -> None:
        queue.add("a")
        queue.add("b")
        woken_by = wake(queue)

        assert short(worker.pull(sequences=1, woken_by=woken_by).jobs) == ["a"]

        assert written_after(queue, woken_by.id) == ["1"]

    @pytest.mark.parametrize("room", [NO_ROOM, {"cache_tokens": 10, "kv_tokens": 10}], ids=["no-room", "too-small"])
    def test_when_it_cannot_take_the_job_then_it_passes_it_on(
        self, queue: Queue, worker: Worker, room: dict[str, int]
    ) -> None:
        queue.add("a")
        woken_by = wake(queue)

        assert worker.pull(woken_by=Notification(woken_by.id, "5-0"), **room).jobs == ()

        assert num_unacknowledged(queue) == 0
        assert written_after(queue, woken_by.id) == ["5-0"]
        check(queue)

    def test_when_the_queue_is_paused_then_it_wakes_nobody(self, queue: Queue, worker: Worker) -> None:
        queue.add("a")
        queue.pause()
        woken_by = wake(queue)

        worker.pull(woken_by=woken_by)

        assert written_after(queue, woken_by.id) == []


class TestGivenAWorkerThatWasNotWoken:
    def test_when_it_leaves_jobs_for_want_of_room_then_it_wakes_one(self, one_queue: Queue) -> None:
        queue = one_queue
        queue.add("a")
        queue.add("b")
        last = wake(queue).id

        queue.worker("A").pull(sequences=1)

        assert written_after(queue, last) == ["1"]

    def test_when_the_jobs_left_do_not_suit_it_then_it_wakes_nobody(self, one_queue: Queue) -> None:
        queue = one_queue
        queue.add("large")
        queue.add("small", "u", max_tokens=1)
        last, room = wake(queue).id, {"kv_tokens": 20, "cache_tokens": 20}

        assert short(queue.worker("A").pull(**room).jobs) == ["small"]
        assert queue.worker("B").pull(**room).jobs == ()

        assert written_after(queue, last) == []

    def test_when_it_makes_a_job_ready_then_it_wakes_one(self, one_queue: Queue) -> None:
        queue, worker = one_queue, one_queue.worker("A")
        for name in ("first", "second"):
            queue.add(name, not_before_ms=queue.now_ms + 10)
            last = worker.pull().last_notification
            queue.pass_time(10)
            room = NO_ROOM if name == "second" else {}

            assert short(worker.pull(**room).jobs) == ([] if room else [name])

            assert written_after(queue, last) == ["1"]


class TestGivenJobsThatOnlyAnotherWorkerCanTake:
    def test_when_they_are_a_dead_workers_then_the_woken_one_returns_them_and_wakes_another(
        self, one_queue: Queue
    ) -> None:
        queue, dead = one_queue, one_queue.worker("dead")
        queue.add("a")
        dead.beat()
        dead.take()
        queue.run(calls.report_death(queue.keys, "dead"))
        woken_by, worker = wake(queue), queue.worker("A")

        reply = worker.pull_only(woken_by=woken_by, **NO_ROOM)

        assert (reply.due_ms, written_after(queue, woken_by.id)) == (reply.server_ms, [])
        worker.maintain()
        assert written_after(queue, woken_by.id) == ["1"]

    def test_when_they_are_suspects_then_a_busy_worker_passes_it_on(self, one_queue: Queue) -> None:
        queue = one_queue
        queue.add("a")
        for name in ("one", "two"):
            worker = queue.worker(name)
            worker.give_back(worker.take(), deregister=True, broken=True)
        assert queue.client.zcard(queue.keys.key("suspects")) == 1
        woken_by = wake(queue)

        assert queue.worker("A").pull(woken_by=woken_by).jobs == ()

        assert written_after(queue, woken_by.id) == [woken_by.id]
