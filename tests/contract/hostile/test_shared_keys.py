"""Another user writes into the keys that all tenants share: jobs run on, and nothing fails half-way."""

import pytest

from sluice.producer.contract import calls
from sluice.producer.contract.states import JobState
from sluice.producer.contract.wire import JobId
from tests.contract.driving import Queue, ending, new_job, short

LAST_ID = f"{2**64 - 1}-{2**64 - 1}"


def run_one(queue: Queue, name: str) -> JobState:
    """Submit a job and run it."""
    queue.add(name, "victim", batch="b")
    worker = queue.worker("A")
    worker.number = int(name.removeprefix("j")) * 10
    worker.beat()
    assert worker.advance(ending(worker.take(), 0, 2)) == [calls.Ok(None)]
    return queue.state(JobId(f"0.victim.{name}"))


class TestGivenASharedStreamAtItsLastId:
    @pytest.mark.parametrize("name", ["bell", "outbox", "garbage"])
    def test_when_jobs_run_then_it_is_made_again(self, queue: Queue, name: str) -> None:
        run_one(queue, "j1")
        num_events = len(queue.events())
        queue.client.xadd(queue.keys.key(name), {"x": "1"}, id=LAST_ID)
        queue.client.zadd(queue.keys.key("timers"), {"garbage": 1})

        assert run_one(queue, "j2") is JobState.DONE

        assert queue.client.xinfo_stream(queue.keys.key(name))["last-generated-id"] != LAST_ID.encode()
        assert len(queue.events()) == num_events + 3


class TestGivenACounterThatIsNoNumber:
    @pytest.mark.parametrize("value", ["x", "1.5", str(2**63 - 1)])
    def test_when_jobs_run_then_they_end_and_all_is_counted_again(self, queue: Queue, value: str) -> None:
        for name in ("submitted", "waiting_jobs", "waiting_tokens", "running_jobs", "done"):
            queue.client.hset(queue.keys.key("counters"), name, value)
        if value != str(2**63 - 1):
            assert run_one(queue, "j1") is JobState.DONE
        else:
            # The bounds of the queue are reached, for everybody.
            (answer,) = queue.submit(new_job("a"))
            assert isinstance(answer, calls.Refused)

    def test_when_it_is_a_batchs_then_a_submit_is_whole(self, queue: Queue) -> None:
        queue.client.hset(queue.keys.key("batch", "b"), "total", "x")

        assert run_one(queue, "j1") is JobState.DONE


class TestGivenTenantsThatDoNotExist:
    def test_when_a_pull_finds_only_them_then_the_next_follows_at_once(self, queue: Queue) -> None:
        queue.add("one", "victim")
        for priority in (7, 8, 9):
            ghosts = {f"ghost{number}": 1 for number in range(100)}
            queue.client.zadd(queue.keys.key("heads", priority), ghosts)
            queue.client.zadd(queue.keys.key("ready", priority), ghosts)
        worker, num_pulls = queue.worker("A"), 1

        reply = worker.pull()
        while not reply.jobs:
            assert reply.has_more
            assert num_pulls < 30
            reply, num_pulls = worker.pull(), num_pulls + 1

        assert short(reply.jobs) == ["one"]
