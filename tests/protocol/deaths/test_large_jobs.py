"""Dead workers hold jobs that fit no survivor: those that fit are found, and pulls do not spin."""

from sluice.protocol import limits
from sluice.protocol.calls import PullReply
from tests.protocol.driving import Queue, Worker, check, short

ROOM = {"kv_tokens": 100, "cache_tokens": 100}


def lease(queue: Queue, worker: Worker, name: str, prompt_tokens: int) -> None:
    """One more job that this worker holds."""
    queue.add(name, prompt_tokens=prompt_tokens)
    assert short(worker.pull().jobs) == [name]


def pull_until(worker: Worker, name: str, *, most: int) -> PullReply:
    """Pull with little room until this job comes."""
    for _ in range(most):
        reply = worker.pull(**ROOM)
        if name in short(reply.jobs):
            return reply
    raise AssertionError(f"{name} is hidden")


class TestGivenLargeJobsOfTheDead:
    def test_when_four_dead_workers_hold_them_then_a_fifth_is_found(self, queue: Queue) -> None:
        for number in range(4):
            lease(queue, queue.worker(f"large{number}"), f"large{number}", 5000)
        queue.pass_time(10)
        lease(queue, queue.worker("small"), "small", 10)
        queue.pass_time(60_000)

        pull_until(queue.worker("survivor"), "small", most=3)

    def test_when_more_than_a_slice_are_left_then_the_next_pull_waits(self, queue: Queue) -> None:
        dead = queue.worker("dead")
        for number in range(40):
            lease(queue, dead, f"large{number}", 5000)
        queue.pass_time(60_000)
        survivor = queue.worker("survivor")

        assert [survivor.pull(**ROOM).has_more for _ in range(3)] == [True, False, False]

    def test_when_a_small_one_is_among_them_then_it_is_found(self, queue: Queue) -> None:
        dead = queue.worker("dead")
        for number in range(70):
            lease(queue, dead, f"large{number}", 5000)
        lease(queue, dead, "small", 10)
        queue.pass_time(60_000)

        pull_until(queue.worker("survivor"), "small", most=3)

    def test_when_many_tenants_have_one_then_a_job_that_fits_is_served(self, queue: Queue) -> None:
        dead = queue.worker("dead")
        for number in range(40):
            queue.add("large", f"t{number}", prompt_tokens=5000)
        room = {"kv_tokens": 10**6, "prefill_tokens": 10**6, "cache_tokens": 10**6}
        assert [len(dead.pull(**room).jobs) for _ in range(2)] == [limits.SLICE_JOBS, 40 - limits.SLICE_JOBS]
        queue.add("small", prompt_tokens=10)
        queue.pass_time(60_000)

        pull_until(queue.worker("survivor"), "small", most=4)
        check(queue)
