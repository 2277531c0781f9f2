"""The backlog of a queue, as the scripts count it on a real server."""

from dataclasses import asdict

import pytest

from sluice.protocol.errors import InvalidSetting
from sluice.protocol.keys import QueueKeys
from sluice.protocol.limits import CAPACITY, CAPACITY_FIELD, HELD_TOKENS_FIELD
from sluice.protocol.scaling.backlog import Backlog, backlog_of, backlog_of_all
from sluice.protocol.scaling.demand import ScalePolicy, scale_of, wanted_by_jobs, wanted_workers
from tests.protocol.driving import Queue, Worker, new_job

POLICY = ScalePolicy(within_s=1.0, max_workers=8)


def backlog(queue: Queue) -> Backlog:
    return backlog_of("q", [queue.look()])


def say(worker: Worker, **fields: str) -> None:
    """Write fields of a worker's status report, which a heartbeat carries."""
    worker.queue.client.hset(worker.queue.keys.key("worker", worker.name), mapping=fields)


class TestGivenAnEmptyQueue:
    def test_when_it_is_read_then_no_worker_is_wanted(self, queue: Queue) -> None:
        found = backlog(queue)

        assert (found.backlog_jobs, found.backlog_tokens, found.oldest_age_s) == (0, 0, None)
        assert (found.worker_tokens_per_s, found.rate_source) == (None, "unknown")
        assert wanted_workers(found, POLICY) == 0


class TestGivenWaitingJobs:
    """Three jobs of 30 tokens, submitted a second apart; nobody knows what a worker gets through."""

    @pytest.fixture(autouse=True)
    def _submit(self, queue: Queue) -> None:
        for name in ("a", "b", "c"):
            queue.add(name)
            queue.pass_time(1000)

    def test_when_it_is_read_then_one_worker_is_wanted_to_measure(self, queue: Queue) -> None:
        found = backlog(queue)

        assert (found.backlog_jobs, found.backlog_tokens, found.oldest_age_s) == (3, 90, 3.0)
        assert wanted_workers(found, POLICY) == 1

    def test_when_the_last_worker_left_a_rate_then_it_counts(self, queue: Queue) -> None:
        queue.client.hset(queue.keys.key("config"), CAPACITY, "45.0")

        scale = scale_of(backlog(queue), POLICY)

        assert (scale.worker_tokens_per_s, scale.rate_source, scale.wanted_workers) == (45.0, "remembered", 2)

    @pytest.mark.parametrize("text", ["", "nan", "inf", "-3", "0", "soon"])
    def test_when_another_program_wrote_nonsense_then_the_rate_is_unknown(self, queue: Queue, text: str) -> None:
        queue.client.hset(queue.keys.key("config"), CAPACITY, text)

        assert backlog(queue).rate_source == "unknown"

    def test_when_workers_have_measured_then_their_mean_counts(self, queue: Queue) -> None:
        queue.client.hset(queue.keys.key("config"), CAPACITY, "1.0")
        for name, rate in (("A", "20"), ("B", "40")):
            worker = queue.worker(name)
            worker.beat()
            say(worker, **{CAPACITY_FIELD: rate})
        queue.worker("C").beat()

        found = backlog(queue)

        assert (found.workers, found.worker_tokens_per_s, found.rate_source) == (3, 30.0, "measured")
        assert wanted_workers(found, POLICY) == 3

    def test_when_the_queue_is_paused_then_no_worker_is_wanted(self, queue: Queue) -> None:
        queue.pause()

        assert wanted_workers(backlog(queue), POLICY) == 0

    def test_when_one_is_pulled_then_it_counts_with_what_it_has_not_used(self, queue: Queue) -> None:
        worker = queue.worker("A")
        worker.beat()
        job = worker.take(sequences=1)
        say(worker, **{CAPACITY_FIELD: "10", HELD_TOKENS_FIELD: "12"})

        found = backlog(queue)

        assert job.cost == 30
        assert (found.backlog_tokens, found.running_jobs, found.running_tokens) == (60, 1, 12)
        assert wanted_workers(found, ScalePolicy(within_s=3.6)) == 2

    def test_when_its_worker_died_then_the_running_job_still_wants_one(self, queue: Queue) -> None:
        worker = queue.worker("A")
        worker.beat()
        worker.pull()
        queue.pass_time(10_000)

        found = backlog(queue)

        assert (found.workers, found.backlog_jobs, found.running_jobs) == (0, 0, 3)
        assert wanted_workers(found, POLICY) == 1

    def test_when_jobs_are_counted_then_their_size_plays_no_part(self, queue: Queue) -> None:
        found = backlog(queue)

        assert [wanted_by_jobs(found, jobs, POLICY) for jobs in (1, 2, 3, 4)] == [3, 2, 1, 1]

    def test_when_a_worker_beats_then_it_is_told_how_many_wait(self, queue: Queue) -> None:
        worker = queue.worker("A")

        ready = [worker.beat().ready_jobs]
        queue.pause()
        ready.append(worker.beat().ready_jobs)

        assert ready == [3, 0]


class TestGivenTwoQueuesOfTheSameWorkers:
    """Each has one job of 30 tokens, and one worker serves both."""

    @pytest.fixture
    def queues(self, queue: Queue) -> list[Queue]:
        both = [queue, Queue(queue.client, QueueKeys(f"{queue.keys.queue}-batch"))]
        for one in both:
            one.add("a")
            one.worker("A").beat()
            say(one.worker("A"), **{CAPACITY_FIELD: "20", HELD_TOKENS_FIELD: "12"})
        return both

    def test_when_they_are_read_then_their_jobs_are_summed_and_the_worker_counts_once(
        self, queues: list[Queue]
    ) -> None:
        found = both(queues)

        assert (found.backlog_jobs, found.backlog_tokens, found.running_tokens, found.workers) == (2, 60, 12, 1)

    def test_when_one_is_paused_then_the_jobs_of_the_other_count_alone(self, queues: list[Queue]) -> None:
        queues[0].pause()

        found = both(queues)

        assert (found.backlog_jobs, found.is_paused, wanted_workers(found, POLICY)) == (1, False, 1)

    def test_when_both_are_paused_then_no_worker_is_wanted(self, queues: list[Queue]) -> None:
        for one in queues:
            one.pause()

        assert wanted_workers(both(queues), POLICY) == 0


def both(queues: list[Queue]) -> Backlog:
    return backlog_of_all({one.keys.queue: [one.look()] for one in queues})


class TestGivenDelayedJobs:
    """One job that may start now, and one in an hour, which is of the same size."""

    @pytest.fixture(autouse=True)
    def _submit(self, queue: Queue) -> None:
        queue.add("now")
        queue.add("later", not_before_ms=queue.now_ms + 3_600_000)

    def test_when_it_is_read_then_only_the_first_counts(self, queue: Queue) -> None:
        found = backlog(queue)

        assert (queue.look().waiting_jobs, found.backlog_jobs, found.backlog_tokens) == (2, 1, 30)
        assert queue.worker("A").beat().ready_jobs == 1

    def test_when_its_time_comes_without_any_worker_then_it_counts(self, queue: Queue) -> None:
        queue.pass_time(3_600_001)

        assert backlog(queue).backlog_jobs == 2


class TestGivenJobsWithDeadlines:
    def test_when_one_is_near_then_the_nearest_is_told(self, queue: Queue) -> None:
        queue.add("far", deadline_ms=queue.now_ms + 60_000)
        queue.add("near", ttl_ms=20_000)

        near_s = backlog(queue).nearest_deadline_s
        queue.pass_time(25_000)

        assert near_s == 20.0
        assert backlog(queue).nearest_deadline_s == -5.0


class TestGivenAPolicy:
    @pytest.mark.parametrize(
        "wrong",
        [{"within_s": 0}, {"within_s": float("inf")}, {"min_workers": -1}, {"min_workers": 3, "max_workers": 2}],
    )
    def test_when_a_value_is_out_of_its_range_then_it_is_refused(self, wrong: dict[str, float]) -> None:
        with pytest.raises(InvalidSetting, match="must be"):
            ScalePolicy(**wrong)  # pyright: ignore[reportArgumentType]  # numbers of either type

    def test_when_a_scale_is_made_then_it_repeats_the_backlog(self, one_queue: Queue) -> None:
        one_queue.submit(new_job("a"))
        found = backlog(one_queue)

        scale = asdict(scale_of(found, POLICY))

        assert {name: scale[name] for name in asdict(found)} == asdict(found)
        assert (scale["within_s"], scale["min_workers"], scale["max_workers"]) == (1.0, 0, 8)
