"""A tenant's limit of running jobs: exact over all workers, and the tenant at it hides nobody."""

import pytest

from sluice.producer.operations.totals import tenant_totals
from sluice.protocol import calls
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, Worker, check, ending, new_job, short


def wait(queue: Queue, tenant: str, num_jobs: int, **changes: int) -> None:
    """Submit jobs `<tenant>0` and so on."""
    queue.submit(*[new_job(f"{tenant}{i}", tenant, **changes) for i in range(num_jobs)])


def end(worker: Worker, *jobs: calls.LeasedJob) -> None:
    """End jobs with two tokens each."""
    assert worker.advance(*[ending(job, 0, 2) for job in jobs]) == [calls.Ok(None)] * len(jobs)


@pytest.mark.every_server
class TestGivenATenantThatMayRunTwoJobs:
    @pytest.fixture(params=["fair", "fifo", "deadline"])
    def limited(self, queue: Queue, request: pytest.FixtureRequest) -> Queue:
        queue.configure(mode=request.param, max_running={"few": 2})
        return queue

    def test_when_more_of_its_jobs_wait_then_workers_run_two_and_all_of_the_others(self, limited: Queue) -> None:
        wait(limited, "few", 5)
        wait(limited, "many", 5)

        first, second = limited.worker("A").pull(sequences=4), limited.worker("B").pull()

        names = short(first.jobs) + short(second.jobs)
        assert sorted(names) == ["few0", "few1", *(f"many{i}" for i in range(5))]
        assert limited.parked() == {"few"}
        check(limited)

    def test_when_one_of_its_jobs_ends_then_the_next_starts(self, limited: Queue) -> None:
        wait(limited, "few", 4)
        worker = limited.worker("A")
        jobs = worker.pull().jobs

        end(worker, jobs[0])

        check(limited)
        assert short(worker.pull().jobs) == ["few2"]
        assert worker.pull().jobs == ()
        check(limited)

    def test_when_jobs_of_several_classes_wait_then_all_count_and_all_wait(self, limited: Queue) -> None:
        wait(limited, "few", 1)
        limited.submit(*[new_job(f"high{i}", "few", priority=9) for i in range(3)])
        worker = limited.worker("A")

        jobs = worker.pull().jobs

        assert short(jobs) == ["high0", "high1"]
        check(limited)
        end(worker, *jobs)
        assert short(worker.pull().jobs) == ["high2", "few0"]

    def test_when_a_parked_tenant_submits_then_no_worker_is_woken(self, limited: Queue) -> None:
        wait(limited, "few", 2)
        worker = limited.worker("A")
        worker.pull()
        before = limited.client.xlen(limited.keys.notifications)

        limited.add("late", "few", priority=3)

        assert limited.client.xlen(limited.keys.notifications) == before
        assert limited.names("heads:*") == set()
        assert worker.pull().jobs == ()
        check(limited)

    def test_when_its_job_is_given_back_then_it_runs_again_first(self, limited: Queue) -> None:
        wait(limited, "few", 3)
        worker = limited.worker("A")
        jobs = worker.pull().jobs
        limited.add("urgent", "few", priority=9)

        worker.give_back(jobs[0])

        check(limited)
        assert short(limited.worker("B").pull().jobs) == ["few0"]
        check(limited)

    def test_when_its_worker_dies_then_its_places_are_free(self, limited: Queue) -> None:
        wait(limited, "few", 3)
        dying = limited.worker("A")
        dying.beat()
        dying.pull()
        limited.pass_time(10_000)

        jobs = limited.worker("B").pull().jobs

        assert short(jobs) == ["few0", "few1"]
        check(limited)

    def test_when_a_running_job_is_cancelled_then_its_place_is_free_once_it_ends(self, limited: Queue) -> None:
        wait(limited, "few", 3)
        worker = limited.worker("A")
        worker.beat()
        jobs = worker.pull().jobs
        assert limited.cancel(jobs[0].id) == ["asked"]
        assert worker.pull().jobs == ()

        worker.advance(ending(jobs[0], 0, state=JobState.CANCELLED))

        assert short(worker.pull().jobs) == ["few2"]
        check(limited)

    def test_when_a_reply_was_lost_then_the_pull_is_repeated_and_nothing_counts_twice(self, limited: Queue) -> None:
        wait(limited, "few", 3)
        worker = limited.worker("A")
        jobs = worker.pull().jobs

        again = worker.pull(number=worker.number).jobs

        assert short(again) == short(jobs)
        check(limited)

    def test_when_a_parked_job_is_too_late_then_it_expires(self, limited: Queue) -> None:
        wait(limited, "few", 2)
        late = limited.add("late", "few", ttl_ms=1000)
        limited.worker("A").pull()
        limited.pass_time(1001)

        limited.fire_timers()

        assert limited.state(late) is JobState.EXPIRED
        check(limited)

    def test_when_a_failed_job_is_requeued_then_it_waits_for_a_place(self, limited: Queue) -> None:
        wait(limited, "few", 3)
        worker = limited.worker("A")
        jobs = worker.pull().jobs
        worker.advance(ending(jobs[0], 0, state=JobState.FAILED))
        assert short(worker.pull().jobs) == ["few2"]

        assert limited.requeue(jobs[0].id) == [True]

        check(limited)
        assert worker.pull().jobs == ()

    def test_when_its_waiting_jobs_are_purged_then_none_is_left(self, limited: Queue) -> None:
        wait(limited, "few", 40)
        limited.worker("A").pull()

        num_jobs = sum(limited.run(calls.purge(limited.keys))[0] for _ in range(3))

        assert num_jobs == 38
        check(limited)


class TestGivenATenantThatRunsFourJobs:
    @pytest.fixture
    def worker(self, queue: Queue) -> Worker:
        wait(queue, "few", 8)
        worker = queue.worker("A")
        worker.pull(sequences=4)
        return worker

    def test_when_it_gets_a_lower_limit_then_they_run_on_and_no_other_starts(self, worker: Worker) -> None:
        queue = worker.queue

        queue.configure(max_running={"few": 2})

        check(queue)
        assert worker.pull().jobs == ()
        jobs = queue.worker("B").pull().jobs
        assert jobs == ()
        for i in range(2):
            worker.advance(ending(queue_job(queue, f"0.few.few{i}"), 0, 2))
            assert worker.pull().jobs == ()
        worker.advance(ending(queue_job(queue, "0.few.few2"), 0, 2))
        assert short(worker.pull().jobs) == ["few4"]
        check(queue)

    def test_when_its_limit_is_zero_then_none_starts_until_it_is_removed(self, worker: Worker) -> None:
        queue = worker.queue
        queue.configure(max_running={"few": 0})
        assert worker.pull().jobs == ()
        check(queue)

        queue.configure(max_running={"few": None})

        assert short(worker.pull().jobs) == ["few4", "few5", "few6", "few7"]
        assert queue.names("parked") | queue.names("leased:*") | queue.names("limits") == set()
        check(queue)

    def test_when_it_gets_a_higher_limit_then_more_start(self, worker: Worker) -> None:
        queue = worker.queue
        queue.configure(max_running={"few": 4})
        assert worker.pull().jobs == ()

        queue.configure(max_running={"few": 5})

        assert short(worker.pull().jobs) == ["few4"]
        check(queue)


class TestGivenAQueueOfThreePartitions:
    @pytest.mark.parametrize(("most", "parts"), [(7, [3, 2, 2]), (3, [1, 1, 1]), (1, [1, 1, 1]), (0, [0, 0, 0])])
    def test_when_a_tenant_has_a_limit_then_each_has_its_part(self, queue: Queue, most: int, parts: list[int]) -> None:
        partitions = [Queue(queue.client, QueueKeys("q", number)) for number in range(3)]
        for partition in partitions:
            partition.configure(partitions=3, max_running={"few": most})

        views = [partition.look() for partition in partitions]

        assert [view.limits[0].max_running for view in views] == parts
        assert tenant_totals("q", views)[0].max_running == sum(parts)
        wait(queue, "few", 5)
        assert len(queue.worker("A").pull().jobs) == parts[0]


def queue_job(queue: Queue, job_id: str) -> calls.LeasedJob:
    """The leased job with this id, as its pull gave it."""
    (found,) = [job for job in queue.worker("A").pull_only(number=1).jobs if job.id == JobId(job_id)]
    return found
