"""A tenant's limit of tokens a minute: a bucket that a job is charged to at its start and corrected at its end."""

import pytest

from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, Worker, check, ending, new_job, short, tokens


def wait(queue: Queue, tenant: str, num_jobs: int) -> None:
    """Submit jobs `<tenant>0` and so on, of 30 tokens each."""
    queue.submit(*[new_job(f"{tenant}{i}", tenant) for i in range(num_jobs)])


def tokens_left(queue: Queue) -> float:
    """Tokens in the bucket of the limited tenant, at its last change."""
    return float(queue.hash_of("buckets")["few"].split()[0])


@pytest.mark.every_server
class TestGivenATenantThatMayTake60TokensAMinute:
    @pytest.fixture(params=["fair", "fifo", "deadline"])
    def limited(self, queue: Queue, request: pytest.FixtureRequest) -> Queue:
        queue.stop_clock()
        queue.configure(mode=request.param, tokens_per_minute={"few": 60})
        return queue

    @pytest.fixture
    def worker(self, limited: Queue) -> Worker:
        wait(limited, "few", 5)
        return limited.worker("A")

    def test_when_its_jobs_wait_then_a_minutes_start_and_all_of_the_others(self, worker: Worker) -> None:
        wait(worker.queue, "many", 5)

        names = sorted(short(worker.pull().jobs))

        assert names == ["few0", "few1", *(f"many{i}" for i in range(5))]
        assert tokens_left(worker.queue) == 0
        check(worker.queue)

    def test_when_tokens_have_flowed_back_then_a_timer_lists_it_again(self, worker: Worker) -> None:
        queue = worker.queue
        reply = worker.pull()
        assert reply.due_ms == queue.now_ms + 1000
        queue.pass_time(999)
        assert worker.pull().jobs == ()

        queue.pass_time(1)

        assert short(worker.pull().jobs) == ["few2"]
        assert tokens_left(queue) == pytest.approx(-29)
        assert worker.pull().due_ms == queue.now_ms + 30_000
        check(queue)

    def test_when_a_job_used_less_than_it_was_charged_then_the_rest_returns(self, worker: Worker) -> None:
        jobs = worker.pull().jobs

        worker.advance(ending(jobs[0], 0, 2))

        assert tokens_left(worker.queue) == 18
        assert short(worker.pull().jobs) == ["few2"]
        check(worker.queue)

    def test_when_a_job_generates_more_than_it_was_charged_then_it_is_charged_on(self, limited: Queue) -> None:
        limited.configure(reserve_tokens=10)
        limited.submit(new_job("long", "few", max_tokens=600), new_job("next", "few"))
        worker = limited.worker("A")
        job = worker.pull(sequences=1).jobs[0]
        assert tokens_left(limited) == 40

        worker.advance(tokens(job, 0, 130))

        assert tokens_left(limited) == 60 - 10 - 130 - 10
        assert worker.pull().jobs == ()
        worker.advance(ending(job, 130, 200))
        assert tokens_left(limited) == 60 - 10 - 330
        check(limited)

    def test_when_a_job_is_given_back_then_it_is_not_charged_twice(self, worker: Worker) -> None:
        job = worker.pull(sequences=1).jobs[0]

        worker.give_back(job)
        worker.pull(sequences=1)

        assert tokens_left(worker.queue) == 30
        check(worker.queue)

    def test_when_it_is_idle_for_long_then_a_minutes_tokens_are_all_it_saves(self, worker: Worker) -> None:
        jobs = worker.pull().jobs
        worker.queue.pass_time(3_600_000)
        worker.beat(*[job.id for job in jobs])

        assert short(worker.pull().jobs) == ["few2", "few3"]

    def test_when_the_clock_steps_back_then_tokens_flow_from_then_on(self, worker: Worker) -> None:
        queue = worker.queue
        worker.beat()
        jobs = worker.pull().jobs
        queue.step_clock(-3_600_000)
        worker.beat(*[job.id for job in jobs])

        queue.step_clock(1000)

        assert short(worker.pull().jobs) == ["few2"]

    def test_when_the_limit_changes_then_the_bucket_is_full_again(self, worker: Worker) -> None:
        worker.pull()

        worker.queue.configure(tokens_per_minute={"few": 90})

        assert short(worker.pull().jobs) == ["few2", "few3", "few4"]
        check(worker.queue)

    def test_when_the_limit_is_removed_then_all_start_and_nothing_is_left_of_it(self, worker: Worker) -> None:
        queue = worker.queue
        worker.pull()

        queue.configure(tokens_per_minute={"few": None})

        assert short(worker.pull().jobs) == ["few2", "few3", "few4"]
        assert queue.names("parked") | queue.names("buckets") | queue.names("limits") == set()
        assert "limited" not in queue.hash_of("config")
        check(queue)

    def test_when_both_limits_hold_then_each_parks_it(self, worker: Worker) -> None:
        queue = worker.queue
        queue.configure(max_running={"few": 1})
        first = worker.pull().jobs
        assert short(first) == ["few0"]
        worker.advance(ending(first[0], 0, 20))
        second = worker.pull().jobs
        assert short(second) == ["few1"]

        worker.advance(ending(second[0], 0, 20))

        assert queue.view(JobId("0.few.few2")).ahead_jobs == 0
        assert worker.pull().jobs == ()
        queue.pass_time(1000)
        assert short(worker.pull().jobs) == ["few2"]
        check(queue)
