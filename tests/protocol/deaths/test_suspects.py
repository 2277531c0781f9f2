"""Decision "Suspects": a job that kills its workers is found by isolation, and its mates complete."""

import pytest

from sluice.protocol import limits
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, Worker, check, ending, new_job, short, tokens


def die(queue: Queue) -> None:
    """Let every incarnation's lifetime expire."""
    queue.pass_time(5000)


def kill(queue: Queue, *names: str) -> None:
    """Let workers of these names take what is there, one after another, and die."""
    for name in names:
        queue.worker(name).pull(is_empty=True)
        die(queue)


def pass_by(queue: Queue, name: str) -> None:
    """Let a worker that takes no suspects see who is dead, and leave as one should."""
    worker = queue.worker(name)
    worker.pull()
    worker.give_back(deregister=True)


def deaths(queue: Queue, job_id: JobId) -> list[str]:
    """Incarnations listed on a job."""
    listed = queue.fields(*job_id.split(".")[1:]).get("deaths", "")
    return [one.split(",")[0] for one in listed.split(";") if one]


class TestGivenAFirstDeath:
    def test_when_another_pulls_then_no_job_is_isolated(self, queue: Queue) -> None:
        queue.submit(new_job("a"), new_job("b"))
        kill(queue, "A")

        jobs = queue.worker("B").pull().jobs

        assert short(jobs) == ["a", "b"]
        assert [deaths(queue, job.id) for job in jobs] == [["A"], ["A"]]
        assert queue.look().suspects == 0
        check(queue)

    def test_when_the_job_makes_progress_then_the_death_is_forgotten(self, queue: Queue) -> None:
        job_id = queue.add("a")
        kill(queue, "A")
        worker = queue.worker("B")
        job = worker.take()

        worker.advance(tokens(job, 0, 1))
        die(queue)

        assert queue.worker("C").take().id == job_id
        assert deaths(queue, job_id) == ["B"]
        check(queue)

    def test_when_it_is_looked_at_often_without_fitting_then_it_is_listed_once(self, queue: Queue) -> None:
        job_id = queue.add("a", prompt_tokens=500)
        kill(queue, "A")
        small = queue.worker("B")
        for _ in range(3):
            small.pull(kv_tokens=100, cache_tokens=100)

        assert deaths(queue, job_id) == ["A"]
        check(queue)

    def test_when_the_owner_was_only_slow_then_it_takes_its_death_off(self, queue: Queue) -> None:
        job_id = queue.add("a")
        slow = queue.worker("A")
        slow.take()
        die(queue)
        queue.worker("B").take()

        reply = slow.beat(job_id)

        assert reply.lost == (job_id,)
        assert deaths(queue, job_id) == []
        check(queue)

    def test_when_an_owner_that_never_received_it_returns_and_dies_then_it_is_listed_once(self, queue: Queue) -> None:
        job_id = queue.add("a")
        slow = queue.worker("A")
        slow.take()
        die(queue)
        queue.worker("B").pull(sequences=0)
        slow.beat()
        slow.take()
        die(queue)

        queue.worker("C").pull(sequences=0)

        assert deaths(queue, job_id) == ["A"]
        assert queue.look().suspects == 0
        check(queue)


class TestGivenASecondDeathWithoutProgress:
    def two_deaths(self, queue: Queue, num_jobs: int = 2) -> list[JobId]:
        ids = [queue.add(f"j{i}") for i in range(num_jobs)]
        kill(queue, "A", "B")
        # A busy worker reclaims: it may not run suspects.
        queue.worker("C").pull()
        return ids

    def test_when_they_are_reclaimed_then_they_are_suspects_and_wait(self, queue: Queue) -> None:
        ids = self.two_deaths(queue)

        assert [queue.state(one) for one in ids] == [JobState.QUEUED] * 2
        assert queue.look().suspects == 2
        assert queue.events(ids[0])[-1].fields["why"] == b"suspect"
        check(queue)

    def test_when_a_busy_worker_pulls_then_it_gets_other_jobs_only(self, queue: Queue) -> None:
        self.two_deaths(queue)
        queue.add("innocent")

        assert short(queue.worker("C").pull(number=2).jobs) == ["innocent"]

    def test_when_an_empty_worker_pulls_then_it_gets_up_to_eight_and_no_other_job(self, queue: Queue) -> None:
        self.two_deaths(queue, 10)
        queue.add("innocent")
        worker = queue.worker("D")

        jobs = worker.pull(is_empty=True).jobs

        assert short(jobs) == [f"j{i}" for i in range(limits.MAX_SUSPECTS_PER_PULL)]
        assert worker.pull(is_empty=False).jobs == ()
        assert worker.pull(is_empty=True).jobs == ()
        worker.advance(*[ending(job, 0, 1) for job in jobs])
        assert short(worker.pull(is_empty=True).jobs) == ["j8", "j9"]
        check(queue)

    def test_when_a_worker_says_that_it_is_empty_but_holds_jobs_then_it_gets_none(self, queue: Queue) -> None:
        queue.add("other")
        worker = queue.worker("D")
        self.two_deaths_with(queue, worker)

        assert worker.pull(is_empty=True).jobs == ()

    def two_deaths_with(self, queue: Queue, living: Worker) -> None:
        held = living.take()
        queue.add("bad")
        for name in ("A", "B"):
            queue.worker(name).pull()
            living.beat(held.id)
            queue.pass_time(3900)
            living.beat(held.id)
            queue.pass_time(200)
        living.pull()

    def test_when_a_suspect_dies_among_suspects_then_each_runs_quite_alone(self, queue: Queue) -> None:
        self.two_deaths(queue, 3)
        kill(queue, "D")  # takes all three, and dies
        queue.worker("E").pull()

        alone = queue.worker("F").pull(is_empty=True).jobs

        assert len(alone) == 1
        assert queue.look().suspects == 2
        check(queue)

    def test_when_an_innocent_one_ends_alone_then_it_is_done(self, queue: Queue) -> None:
        ids = self.two_deaths(queue, 2)
        kill(queue, "D")
        queue.worker("E").pull()
        for name in ("F", "G"):
            worker = queue.worker(name)
            (job,) = worker.pull(is_empty=True).jobs
            worker.advance(ending(job, 0, 2))

        assert [queue.state(one) for one in ids] == [JobState.DONE] * 2
        assert queue.look().suspects == 0
        check(queue)

    def test_when_it_dies_twice_quite_alone_then_it_goes_to_the_dead_set(self, queue: Queue) -> None:
        job_id = queue.add("bad")
        kill(queue, "A", "B")  # alone, but not apart: no more guilty than others
        pass_by(queue, "C")
        assert queue.look().suspects == 1
        kill(queue, "D")
        pass_by(queue, "E")
        assert queue.look().suspects == 1
        kill(queue, "F")
        pass_by(queue, "G")

        view = queue.view(job_id)
        assert (view.state, view.error_code) == (JobState.FAILED, "killed_its_worker")
        assert queue.look().dead == 1
        check(queue)

    def test_when_as_many_die_without_it_then_it_runs_again_up_to_a_bound(self, queue: Queue) -> None:
        job_id = queue.add("unlucky")
        kill(queue, "A", "B")
        pass_by(queue, "C")
        for round_ in range(limits.MAX_DEATHS_ALONE):
            assert queue.state(job_id) is JobState.QUEUED, "two deaths alone, and as many elsewhere, say nothing"
            for name in (f"idle{round_}a", f"idle{round_}b"):
                queue.worker(name).pull()  # takes no suspect, and dies with nothing
            kill(queue, f"alone{round_}")
            pass_by(queue, f"after{round_}")

        view = queue.view(job_id)
        assert (view.state, view.error_code) == (JobState.FAILED, "killed_its_worker")
        assert [death.is_apart for death in view.deaths] == [False, False] + [True] * limits.MAX_DEATHS_ALONE
        assert queue.look().worker_deaths == 2 + 3 * limits.MAX_DEATHS_ALONE
        check(queue)

    def test_when_a_worker_leaves_or_is_seen_dead_twice_then_deaths_are_numbered(self, queue: Queue) -> None:
        ids = self.two_deaths(queue)  # and C, which holds nothing, lives
        pass_by(queue, "D")

        numbers = [[death.number for death in queue.view(one).deaths] for one in ids]

        assert numbers == [[1, 2], [1, 2]]
        assert queue.look().worker_deaths == 2

    def test_when_the_count_is_damaged_then_all_jobs_of_the_dead_are_still_reclaimed(self, queue: Queue) -> None:
        for name in ("A", "B"):
            queue.add(f"of {name}".replace(" ", "-"))
            queue.worker(name).pull()
        queue.client.hset(queue.keys.key("counters"), "worker_deaths", "x")
        die(queue)

        jobs = queue.worker("C").pull().jobs

        assert short(jobs) == ["of-A", "of-B"]
        assert queue.look().worker_deaths == 2
        check(queue)

    def test_when_it_died_apart_among_others_and_once_alone_then_it_is_not_given_up_yet(self, queue: Queue) -> None:
        self.two_deaths(queue)
        for name in ("D", "F"):  # both of them apart, then one of them alone
            kill(queue, name)
            queue.worker(f"after {name}").pull()

        assert (queue.look().dead, queue.look().suspects) == (0, 2)
        check(queue)

    def test_when_owners_turn_out_to_be_slow_only_then_the_job_waits_as_others_do(self, queue: Queue) -> None:
        queue.add("a")
        queue.add("b")
        slow = queue.worker("A")
        ids = [job.id for job in slow.pull().jobs]
        die(queue)
        kill(queue, "B")
        queue.worker("C").pull()
        assert queue.look().suspects == 2

        slow.beat(*ids)

        assert queue.look().suspects == 0
        assert short(queue.worker("D").pull().jobs) == ["a", "b"]
        check(queue)

    def test_when_it_is_cancelled_then_it_is_no_suspect_any_more(self, queue: Queue) -> None:
        ids = self.two_deaths(queue)

        assert queue.cancel(*ids) == ["cancelled"] * 2
        assert queue.look().suspects == 0
        check(queue)


class TestGivenASuspectThatWaits:
    def waiting(self, queue: Queue) -> None:
        queue.submit(new_job("a"), new_job("b"))
        kill(queue, "A", "B")
        queue.worker("C").pull()

    def test_when_it_has_waited_long_then_the_next_worker_drains_and_others_continue(self, queue: Queue) -> None:
        self.waiting(queue)
        queue.add("innocent")
        first, second = queue.worker("D"), queue.worker("E")
        queue.pass_time(int(limits.SUSPECT_WAIT_S * 1000) + 1)
        first.beat()
        second.beat()

        reply = first.pull()

        assert (reply.jobs, reply.drain_for_suspects) == ((), True)
        other = second.pull()
        assert (short(other.jobs), other.drain_for_suspects) == (["innocent"], False)
        assert first.pull().drain_for_suspects
        assert short(first.pull(is_empty=True).jobs) == ["a", "b"]
        assert queue.names("isolator") == set()
        check(queue)

    @pytest.mark.parametrize("how", ["is quieted", "dies", "deregisters"])
    def test_when_the_draining_worker_stops_pulling_then_another_drains(self, queue: Queue, how: str) -> None:
        self.waiting(queue)
        queue.pass_time(int(limits.SUSPECT_WAIT_S * 1000) + 1)
        first, second = queue.worker("D"), queue.worker("E")
        assert first.pull().drain_for_suspects
        assert not second.pull().drain_for_suspects

        if how == "deregisters":
            first.give_back(deregister=True)
        queue.pass_time(int(limits.HEARTBEAT_LIFETIME_S * 1000) + 1)
        if how == "is quieted":
            first.beat()
        second.beat()

        assert second.pull().drain_for_suspects
        assert short(second.pull(is_empty=True).jobs) == ["a", "b"]
        check(queue)

    def test_when_it_drains_for_long_then_it_stays_the_one_that_drains(self, queue: Queue) -> None:
        self.waiting(queue)
        queue.pass_time(int(limits.SUSPECT_WAIT_S * 1000) + 1)
        first, second = queue.worker("D"), queue.worker("E")

        for _ in range(20):
            first.beat()
            second.beat()
            assert first.pull().drain_for_suspects
            assert not second.pull().drain_for_suspects
            queue.pass_time(1000)

    def test_when_it_has_waited_little_then_no_worker_drains(self, queue: Queue) -> None:
        self.waiting(queue)

        assert not queue.worker("D").pull().drain_for_suspects


class TestGivenAJobThatKillsAmong64:
    def test_when_workers_come_and_go_then_it_alone_is_given_up_and_63_complete(self, one_queue: Queue) -> None:
        queue = one_queue
        ids = [queue.add(f"j{i:02}") for i in range(64)]
        killer = ids[17]
        for round_ in range(60):
            worker = queue.worker(f"W{round_}")
            while jobs := worker.pull(is_empty=not queue.names(f"held:W{round_}")).jobs:
                if killer in [job.id for job in jobs]:
                    break
                worker.advance(*[ending(job, sum(job.published), 1) for job in jobs])
            die(queue)
            if queue.look().waiting_jobs + queue.look().running_jobs == 0:
                break

        states = {one: queue.state(one) for one in ids}
        assert states.pop(killer) is JobState.FAILED
        assert set(states.values()) == {JobState.DONE}
        check(queue)


class TestGivenAJobThatBreaksItsWorkersCleanly:
    """Each hands its jobs back and deregisters, and a supervisor starts the next."""

    def test_when_it_is_repeated_then_the_job_is_given_up_and_its_mate_continues(self, queue: Queue) -> None:
        queue.submit(new_job("bad"), new_job("good"))
        breaks, at = 0, 0
        while self.state(queue, "bad") != "failed":
            breaks += 1
            assert breaks <= 8, "it would never end"
            worker = queue.worker(f"W{breaks}")
            jobs = worker.pull(is_empty=True).jobs
            for good in [job for job in jobs if job.id == "0.t.good"]:
                worker.advance(tokens(good, at, 1))
                at += 1
            worker.give_back(*jobs, deregister=True, broken=True)

        assert queue.fields("t", "bad")["error_code"] == "killed_its_worker"
        assert self.state(queue, "good") == "queued"
        check(queue)

    @staticmethod
    def state(queue: Queue, name: str) -> str:
        return queue.fields("t", name)["state"]

    def test_when_a_worker_leaves_as_asked_then_no_death_is_listed(self, queue: Queue) -> None:
        job_id = queue.add("a")
        worker = queue.worker("A")

        worker.give_back(worker.take(), deregister=True)

        assert deaths(queue, job_id) == []
