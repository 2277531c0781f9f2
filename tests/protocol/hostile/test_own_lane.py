"""A submitting user writes into the lane of its own tenant: calls that touch the lane are whole, others are served."""

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.states import JobState
from tests.protocol.driving import Queue, check, ending, new_job, short

LAST_ID = f"{2**64 - 1}-{2**64 - 1}"
FOREIGN_LANE_WAIT_MS = int(limits.FOREIGN_LANE_WAIT_S * 1000)


def end_lane(queue: Queue, lane: str) -> None:
    """Add the last possible id: the stream takes no further entry."""
    queue.client.xadd(queue.keys.key("lane", lane), {"x": "1"}, id=LAST_ID)


class TestGivenAnEntryAtTheLastIdOfALane:
    def test_when_a_pull_reads_the_lane_then_it_takes_all_before_and_others(self, queue: Queue) -> None:
        queue.add("mine", "evil")
        end_lane(queue, "0:evil")
        queue.add("one", "victim")

        jobs = queue.worker("A").pull().jobs

        assert sorted(short(jobs)) == ["mine", "one"]
        check(queue)

    def test_when_its_user_submits_then_it_is_refused_and_others_are_accepted(self, queue: Queue) -> None:
        queue.add("mine", "evil")
        end_lane(queue, "0:evil")

        refused, accepted = queue.submit(new_job("more", "evil"), new_job("one", "victim"))

        assert isinstance(refused, calls.Refused)
        assert refused.reason == "wrong_type"
        assert isinstance(accepted, calls.Accepted)

    def test_when_a_worker_gives_back_a_job_of_it_then_all_that_it_gives_back_wait(self, queue: Queue) -> None:
        mine, one = queue.add("mine", "evil"), queue.add("one", "victim")
        worker = queue.worker("A")
        jobs = worker.pull().jobs
        end_lane(queue, "returned:evil")

        assert worker.give_back(*jobs) == [True, True]

        assert [queue.state(one_id) for one_id in (mine, one)] == [JobState.QUEUED] * 2
        assert short(queue.worker("B").pull().jobs) == ["one"]
        queue.pass_time(11_000)
        assert "mine" in short(queue.worker("C").pull().jobs)

    def test_when_a_dead_workers_jobs_are_reclaimed_then_others_run_on(self, queue: Queue) -> None:
        queue.add("mine", "evil")
        queue.add("one", "victim")
        queue.worker("A").pull()
        queue.worker("A").beat()
        end_lane(queue, "returned:evil")
        queue.worker("B").beat()
        queue.pass_time(10_000)
        survivor = queue.worker("B")
        survivor.beat()

        one = survivor.take()
        queue.client.delete(queue.keys.key("lane", "returned", "evil"))
        queue.pass_time(FOREIGN_LANE_WAIT_MS)
        survivor.beat(one.id)

        assert (one.id, short(survivor.pull().jobs)) == ("0.victim.one", ["mine"])


class TestGivenABatchWhoseTotalsAreNoNumbers:
    @pytest.mark.parametrize("value", ["x", "9" * 30])
    def test_when_a_failed_job_is_requeued_then_it_waits(self, queue: Queue, value: str) -> None:
        job = queue.add("one", batch="b")
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, 2, state=JobState.FAILED))
        queue.client.hset(queue.keys.key("batch", "b"), "failed", value)

        assert queue.requeue(job) == [True]

        assert queue.state(job) is JobState.QUEUED
        assert short(queue.worker("A").pull(number=9).jobs) == ["one"]

    def test_when_a_client_looks_at_it_then_they_count_as_nothing(self, queue: Queue) -> None:
        queue.add("one", batch="b")
        for name in ("total", "done", "completed", "deadline"):
            queue.client.hset(queue.keys.key("batch", "b"), name, "x")

        view = queue.run(calls.inspect_batch(queue.keys, "b"))

        assert (view.total, view.ended) == (0, 0)
