"""A process whose parent has seen its end: its jobs move at once, and the report is final."""

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.calls import Ok, Replaced
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, Worker, check, ending, short, tokens

EXPIRY_MS = 4000


def report(queue: Queue, incarnation: str) -> bool:
    return queue.run(calls.report_death(queue.keys, incarnation))


def num_notified(queue: Queue) -> int:
    return len(queue.entries(queue.keys.notifications))


def counted_deaths(queue: Queue) -> int:
    return int(queue.hash_of("counters").get("worker_deaths", 0))


@pytest.mark.every_server
class TestGivenAWorkerThatHoldsAJob:
    """It has published three tokens, and its heartbeat is valid."""

    def given(self, queue: Queue) -> tuple[Worker, calls.LeasedJob]:
        queue.add("a")
        worker = queue.worker("A")
        job = worker.take()
        worker.beat(job.id)
        worker.advance(tokens(job, 0, 3))
        return worker, job

    def test_when_its_death_is_reported_then_the_next_pull_of_another_has_the_job(self, queue: Queue) -> None:
        dead, old = self.given(queue)
        before = num_notified(queue)

        assert report(queue, "A")

        assert num_notified(queue) == before + 1, "an idle worker is woken"
        assert "A" not in queue.look().workers
        job = queue.worker("B").take()
        assert (job.id, job.epoch, job.attempt, job.published) == (old.id, 2, 2, (3,))
        assert job.resumed_from == "A"
        assert queue.events(old.id)[-2].fields["why"] == b"death"
        assert counted_deaths(queue) == 1
        assert dead.advance(tokens(old, 3, 1)) == [Replaced()], "what was in flight is refused"
        assert queue.client.pttl(queue.keys.key("worker", "A")) > 0
        check(queue)

    def test_when_it_is_reported_twice_then_one_death_is_counted(self, queue: Queue) -> None:
        self.given(queue)

        assert report(queue, "A")
        assert report(queue, "A")
        worker = queue.worker("B")
        worker.take()
        assert not report(queue, "A"), "nothing of it is left"
        assert worker.pull().jobs == ()

        assert counted_deaths(queue) == 1
        assert len(queue.view(only_job(queue)).deaths) == 1
        check(queue)

    def test_when_it_is_reported_after_its_heartbeat_expired_then_nothing_changes(self, queue: Queue) -> None:
        _, old = self.given(queue)
        queue.pass_time(EXPIRY_MS + 1)

        assert report(queue, "A")

        assert queue.worker("B").take().id == old.id
        assert counted_deaths(queue) == 1
        check(queue)

    def test_when_it_is_reported_after_the_reclaim_then_the_new_owner_keeps_the_job(self, queue: Queue) -> None:
        self.given(queue)
        queue.pass_time(EXPIRY_MS + 1)
        worker = queue.worker("B")
        job = worker.take()

        assert not report(queue, "A")

        assert queue.worker("C").pull().jobs == ()
        assert worker.advance(ending(job, 3, 1)) == [Ok()]
        assert counted_deaths(queue) == 1
        check(queue)

    def test_when_a_heartbeat_was_in_flight_then_it_does_not_bring_the_dead_back(self, queue: Queue) -> None:
        dead, old = self.given(queue)
        report(queue, "A")

        assert dead.beat(old.id).lost == (old.id,)

        assert "A" not in queue.look().workers
        assert queue.worker("B").take().id == old.id
        assert dead.beat(old.id).lost == (old.id,), "nor after its jobs have moved"
        assert "A" not in queue.look().workers
        assert counted_deaths(queue) == 1
        assert len(queue.view(old.id).deaths) == 1
        check(queue)

    def test_when_a_pull_was_in_flight_then_it_takes_no_job(self, queue: Queue) -> None:
        dead, old = self.given(queue)
        report(queue, "A")
        new = queue.add("new")

        assert dead.pull().jobs == ()

        assert {job.id for job in queue.worker("B").pull().jobs} == {old.id, new}
        assert dead.pull().jobs == ()
        check(queue)

    def test_when_an_end_was_in_flight_then_the_job_is_done_and_does_not_move(self, queue: Queue) -> None:
        dead, old = self.given(queue)
        report(queue, "A")

        assert dead.advance(ending(old, 3, 1)) == [Ok()]

        assert queue.worker("B").pull().jobs == ()
        assert queue.state(old.id) is JobState.DONE
        check(queue)

    def test_when_it_gave_the_job_back_meanwhile_then_only_that_counts(self, queue: Queue) -> None:
        dead, old = self.given(queue)
        dead.give_back(old)

        assert report(queue, "A")

        job = queue.worker("B").take()
        assert job.id == old.id
        assert queue.view(old.id).deaths == ()
        check(queue)

    def test_when_it_has_deregistered_then_there_is_nothing_to_report(self, queue: Queue) -> None:
        dead, old = self.given(queue)
        dead.give_back(old, deregister=True)

        assert not report(queue, "A")

        queue.worker("B").take()
        assert counted_deaths(queue) == 0
        check(queue)

    def test_when_it_deregistered_with_the_job_then_it_moves_without_a_death(self, queue: Queue) -> None:
        dead, old = self.given(queue)
        dead.give_back(deregister=True)

        report(queue, "A")

        assert queue.worker("B").take().id == old.id
        assert counted_deaths(queue) == 0
        assert queue.view(old.id).deaths == ()
        check(queue)

    def test_when_another_incarnation_is_reported_then_it_stays_alive(self, queue: Queue) -> None:
        worker, old = self.given(queue)
        worker.beat(old.id)

        assert not report(queue, "never began")

        assert queue.worker("B").pull().jobs == ()
        assert worker.beat(old.id).lost == ()
        assert queue.names("worker:*") == {"worker:A"}
        check(queue)

    def test_when_the_job_was_flagged_then_it_ends_instead(self, queue: Queue) -> None:
        _, old = self.given(queue)
        queue.cancel(old.id)

        report(queue, "A")

        assert queue.worker("B").pull().jobs == ()
        assert queue.state(old.id) is JobState.CANCELLED
        check(queue)


class TestGivenWorkersThatMayNotReclaim:
    """One was cut off a moment ago, or Redis has just started: other workers may only seem dead."""

    def given(self, queue: Queue) -> None:
        queue.add("reported")
        queue.worker("A").take()
        queue.add("expired")
        queue.worker("B").take()
        queue.pass_time(EXPIRY_MS + 1)
        report(queue, "A")

    def test_when_one_of_the_dead_was_reported_then_its_jobs_move_and_no_others(self, queue: Queue) -> None:
        self.given(queue)

        assert short(queue.worker("C").pull(may_declare_dead=False).jobs) == ["reported"]

        assert short(queue.worker("C").pull(number=2).jobs) == ["expired"]
        check(queue)

    def test_when_many_have_expired_before_it_then_some_call_returns_its_jobs(self, queue: Queue) -> None:
        for number in range(limits.SLICE_JOBS + 1):
            queue.worker(f"idle{number:02}").pull()
        queue.pass_time(10)
        queue.add("reported")
        queue.worker("late").take()
        queue.pass_time(EXPIRY_MS + 1)
        report(queue, "late")

        worker = queue.worker("C")
        found = [worker.maintain(may_declare_dead=False).num_returned for _ in range(limits.SLICE_JOBS + 2)]

        assert sum(found) == 1

    def test_when_a_worker_has_deregistered_with_it_then_every_caller_returns_it(self, queue: Queue) -> None:
        queue.add("a")
        worker = queue.worker("A")
        worker.take()
        worker.give_back(deregister=True)

        assert queue.run(calls.maintain(queue.keys)).num_returned == 1

    def test_when_the_pull_waited_for_a_stalled_redis_then_the_same_holds(self, queue: Queue) -> None:
        self.given(queue)

        jobs = queue.worker("C").pull(until_ms=queue.now_ms - 1).jobs

        assert short(jobs) == ["reported"]
        check(queue)

    def test_when_redis_has_just_started_then_the_same_holds(self, queue: Queue) -> None:
        self.given(queue)
        # The server's uptime as the queue sees it: its clock now shows when the server was started.
        up_s = queue.client.info("server")["uptime_in_seconds"]
        behind_ms = -3_600_000 - EXPIRY_MS - 1 - up_s * 1000
        queue.pass_time(behind_ms)
        for name in ("A", "B"):
            queue.client.zincrby(queue.keys.key("alive"), behind_ms, name)

        assert short(queue.worker("C").pull().jobs) == ["reported"]

        check(queue)


class TestGivenASuspect:
    """Two workers died with the job and made no progress."""

    def given(self, queue: Queue) -> None:
        queue.add("a")
        for name in ("A", "B"):
            queue.worker(name).pull()
            report(queue, name)
        queue.worker("C").pull()
        assert queue.look().suspects == 1

    def test_when_its_workers_deaths_are_reported_then_they_count_as_any(self, queue: Queue) -> None:
        self.given(queue)
        for name in ("D", "E"):
            assert short(queue.worker(name).pull(is_empty=True).jobs) == ["a"]
            report(queue, name)
            assert queue.worker(f"after {name}").pull().jobs == (), "a suspect waits for an empty worker"

        view = queue.view(only_job(queue))
        assert (view.state, view.error_code) == (JobState.FAILED, "killed_its_worker")
        assert [(one.incarnation, one.is_apart) for one in view.deaths] == [
            ("A", False), ("B", False), ("D", True), ("E", True),
        ]  # fmt: skip
        assert counted_deaths(queue) == 4
        check(queue)

    def test_when_a_report_comes_twice_around_the_reclaim_then_it_is_one_death(self, queue: Queue) -> None:
        self.given(queue)
        queue.worker("D").pull(is_empty=True)
        report(queue, "D")
        worker = queue.worker("E")
        worker.pull()
        report(queue, "D")
        worker.pull()

        view = queue.view(only_job(queue))
        assert view.state is JobState.QUEUED
        assert [one.incarnation for one in view.deaths] == ["A", "B", "D"]
        check(queue)


def only_job(queue: Queue) -> JobId:
    """The one job that there is."""
    (name,) = queue.names("job:*")
    tenant, random = name.removeprefix("job:").split(":")
    return JobId(f"{queue.keys.partition}.{tenant}.{random}")
