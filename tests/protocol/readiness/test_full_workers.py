"""A full worker takes jobs of a higher class than it runs, when idle workers have had the time to (over_class)."""

from collections.abc import Iterator, Sequence

import pytest

from sluice.protocol import limits
from sluice.protocol.calls import PullReply
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, Worker, check, new_job, short, tokens
from tests.protocol.test_races import Step, orders, queues

__all__ = ["queues"]

WAIT_MS = limits.IDLE_FIRST_MS


class TestGivenAFullWorkerOfClassTwo:
    def test_when_jobs_of_all_classes_have_waited_then_it_takes_the_higher_ones(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"p{p}", priority=p) for p in (0, 2, 3, 9)])
        queue.pass_time(WAIT_MS)

        reply = queue.worker("full").pull(over_class=2)

        assert short(reply.jobs) == ["p9", "p3"]
        assert (reply.has_more, reply.look_again_ms) == (False, None)
        check(queue)

    @pytest.mark.parametrize("mode", ["fifo", "fair", "deadline"])
    def test_when_a_job_has_not_waited_then_it_is_told_when_to_pull_again(self, queue: Queue, mode: str) -> None:
        queue.configure(mode=mode)
        queue.worker("other").beat()
        queue.add("old", "first", priority=9)
        queue.pass_time(WAIT_MS - 20)
        queue.add("new", "second", priority=9)
        full = queue.worker("full")

        early = full.pull(over_class=2)
        queue.pass_time(20)
        due = full.pull(over_class=2)
        queue.pass_time(WAIT_MS - 20)
        late = full.pull(over_class=2)

        assert (early.jobs, early.look_again_ms) == ((), early.server_ms + 20)
        assert (short(due.jobs), due.look_again_ms) == (["old"], due.server_ms + WAIT_MS - 20)
        assert short(late.jobs) == ["new"]
        check(queue)

    def test_when_no_other_worker_lives_then_it_takes_one_that_has_not_waited(self, queue: Queue) -> None:
        full, dead = queue.worker("full"), queue.worker("dead")
        dead.beat()
        full.beat()
        queue.pass_time(3000)
        full.beat()
        queue.add("first", priority=9)
        before = full.pull(over_class=2)
        queue.pass_time(3000)
        full.beat()
        queue.add("second", priority=9)

        after = full.pull(over_class=2)

        assert before.jobs == ()
        assert short(after.jobs) == ["first", "second"]
        check(queue)

    def test_when_a_lower_class_has_its_share_saved_then_it_waits_for_a_free_place(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"high{i}", "high", priority=9) for i in range(30)], new_job("low", "low"))
        queue.pass_time(WAIT_MS)
        full = queue.worker("full")

        taken = short(full.pull(over_class=2, sequences=25).jobs)

        assert len(taken) == 25
        assert all(name.startswith("high") for name in taken)
        assert short(queue.worker("free").pull(sequences=1).jobs) == ["low"], "it saved up 25 * 30 * 5/95 tokens"

    def test_when_its_head_fits_nothing_that_is_given_up_then_it_holds_it(self, queue: Queue) -> None:
        queue.add("large", priority=9, prompt_tokens=500)
        queue.pass_time(WAIT_MS)

        (job,) = queue.worker("full").pull(over_class=2, kv_tokens=100).jobs

        assert not job.fits

    def test_when_the_class_is_none_then_the_script_refuses_it(self, queue: Queue) -> None:
        with pytest.raises(Exception, match="wrong arguments"):
            queue.worker("full").pull(over_class=10)


class TestGivenReturnedJobs:
    """They have waited for their submit time, and woken the idle workers."""

    def given_back(self, queue: Queue, priorities: Sequence[int]) -> list[JobId]:
        names = [queue.add(f"r{i}p{p}", priority=p) for i, p in enumerate(priorities)]
        first = queue.worker("first")
        leased = [first.take() for _ in names] if len(names) == 1 else list(first.pull().jobs)
        first.advance(*[tokens(job, 0, 3) for job in leased])
        by_name = {job.id: job for job in leased}
        for name in names:
            first.give_back(by_name[name])
        return names

    def test_when_one_of_a_higher_class_is_behind_others_then_a_full_worker_takes_it(self, queue: Queue) -> None:
        *_, higher = self.given_back(queue, [0, 2, 9])
        full = queue.worker("full")

        (job,) = full.pull(over_class=2).jobs

        assert (job.id, job.published) == (higher, (3,))
        assert short(queue.worker("free").pull().jobs) == ["r0p0", "r1p2"]
        check(queue)

    def test_when_many_are_of_a_lower_class_then_a_pull_looks_at_a_slice(self, queue: Queue) -> None:
        self.given_back(queue, [0] * 20 + [9])
        queue.submit(*[new_job(f"p{i}", "other") for i in range(3)], new_job("higher", "other", priority=9))
        queue.pass_time(WAIT_MS)

        reply = queue.worker("full").pull(over_class=0)

        assert short(reply.jobs) == ["r20p9", "higher"]
        check(queue)

    @pytest.mark.parametrize("num_tenants", [8, 17, 40])
    def test_when_many_tenants_have_lower_ones_then_they_hide_no_higher_one(
        self, one_queue: Queue, num_tenants: int
    ) -> None:
        queue = one_queue
        queue.submit(*[new_job(f"low{i}", f"t{i:02}") for i in range(num_tenants)])
        first, full = queue.worker("first"), queue.worker("full")
        leased = [job for _ in range(4) for job in first.pull().jobs]
        assert first.give_back(*leased) == [True] * num_tenants
        queue.add("waits", "vip", priority=9)
        queue.pass_time(WAIT_MS)

        assert short(full.pull(over_class=0).jobs) == ["waits"]
        assert not full.pull(over_class=0).has_more
        check(queue)

    def test_when_a_higher_one_is_among_many_lower_then_some_pull_finds_it(self, one_queue: Queue) -> None:
        queue = one_queue
        queue.submit(*[new_job(f"low{i}", f"t{i:02}") for i in range(16)], new_job("high", "t99", priority=9))
        first, full = queue.worker("first"), queue.worker("full")
        leased = [*first.pull().jobs, *first.pull().jobs]
        assert len(leased) == 17
        first.give_back(*leased)

        found = [short(full.pull(over_class=0).jobs) for _ in range(3)]

        assert ["high"] in found


class TestGivenADeadWorker:
    def test_when_a_full_worker_pulls_then_it_takes_over_the_higher_classes_alone(self, queue: Queue) -> None:
        queue.add("low")
        high = queue.add("high", priority=9)
        dead, full = queue.worker("dead"), queue.worker("full")
        dead.beat()
        dead.pull()
        full.beat()
        queue.pass_time(3000)
        full.beat()
        queue.pass_time(3000)

        reply = full.pull(over_class=0)

        assert [(job.id, job.resumed_from, job.fits) for job in reply.jobs] == [(high, "dead", True)]
        assert not reply.has_more
        assert short(queue.worker("free").pull().jobs) == ["low"]
        check(queue)


class Puller:
    """A worker that pulls, each time twice under one number, and notes what it got and when. Changes."""

    def __init__(self, worker: Worker, over_class: int | None) -> None:
        self.worker = worker
        self.over_class = over_class
        self.got: list[tuple[JobId, int]] = []

    def pull(self) -> None:
        first = self.worker.pull(over_class=self.over_class)
        again: PullReply = self.worker.pull(number=self.worker.number, over_class=self.over_class)
        assert short(first.jobs) == short(again.jobs)
        self.got += [(job.id, first.server_ms) for job in first.jobs]


class TestGivenAnIdleAndTwoFullWorkers:
    """A job of class 9 is submitted; time passes; two full workers of classes 0 and 5 pull, and an idle one."""

    def test_when_they_come_in_any_order_then_one_has_it_and_no_full_one_early(self, queues: Iterator[Queue]) -> None:
        num_orders, outcomes = 0, set[str]()
        for order in orders(("submit", "wait"), ("idle",), ("full 0", "full 0"), ("full 5",)):
            queue = next(queues)
            began_ms = queue.now_ms
            idle = Puller(queue.worker("idle"), None)
            idle.worker.beat()
            full = [Puller(queue.worker("full 0"), 0), Puller(queue.worker("full 5"), 5)]
            steps: dict[str, Step] = {
                "submit": lambda queue=queue: queue.add("a", priority=9),
                "wait": lambda queue=queue: queue.pass_time(WAIT_MS),
                "idle": idle.pull,
                "full 0": full[0].pull,
                "full 5": full[1].pull,
            }
            for name in order:
                steps[name]()

            num_orders += 1
            owners = [one for one in (idle, *full) if one.got]
            assert len(owners) <= 1, order
            for one in full:
                assert all(at_ms >= began_ms + WAIT_MS for _, at_ms in one.got), order
            assert queue.state(JobId("0.t.a")) is (JobState.RUNNING if owners else JobState.QUEUED), order
            outcomes.add(owners[0].worker.name if owners else "nobody")
            check(queue)

        assert num_orders == 180
        assert outcomes == {"idle", "full 0", "full 5", "nobody"}
