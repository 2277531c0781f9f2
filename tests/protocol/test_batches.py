"""Whole batches: cancelled and expired in slices, closed, completed once, in whatever order the last ends come."""

from collections.abc import Callable
from itertools import permutations

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.calls import BatchView, Refused
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, Worker, check, ending, new_job, tokens

Act = Callable[[], object]


def cancel(queue: Queue, batch: str = "b", reason: str | None = None) -> tuple[int, int, bool]:
    """One slice."""
    return queue.run(calls.cancel_batch(queue.keys, batch, reason=reason))


def expire(queue: Queue, in_ms: int, batch: str = "b") -> BatchView:
    """A deadline so much later."""
    return queue.run(calls.expire_batch(queue.keys, batch, deadline_ms=queue.now_ms + in_ms))


def look(queue: Queue, batch: str = "b") -> BatchView:
    """Its numbers."""
    return queue.run(calls.inspect_batch(queue.keys, batch))


def callbacks(queue: Queue) -> list[str]:
    """Batches that were said to be complete."""
    return [f[b"id"].decode() for _, f in queue.entries(queue.keys.callbacks) if f[b"kind"] == b"batch"]


def members(queue: Queue, batch: str = "b") -> dict[str, float]:
    """Jobs that have not ended, and whether they were asked to."""
    return {
        name.decode(): score
        for name, score in queue.client.zrange(queue.keys.key("members", batch), 0, -1, withscores=True)
    }


@pytest.fixture(autouse=True)
def exported(queue: Queue) -> None:
    """Every completed batch has a callback, those without a URL too."""
    queue.configure(export_batches=True)


class TestGivenADeadlineThatIsSetBeforeTheFirstJob:
    def test_when_it_passes_then_the_batch_s_jobs_expire_and_no_more_are_accepted(self, queue: Queue) -> None:
        expire(queue, in_ms=100)
        job = queue.add("early", batch="b")

        queue.pass_time(101)
        queue.fire_timers()

        assert queue.state(job) is JobState.EXPIRED
        view = look(queue)
        assert (view.is_closed, view.total, view.expired) == (True, 1, 1)
        [late] = queue.submit(new_job("late", batch="b"))
        assert isinstance(late, Refused)
        assert late.reason == "batch_closed"

    def test_when_it_passes_without_any_job_then_the_batch_is_forgotten(self, queue: Queue) -> None:
        expire(queue, in_ms=100)

        queue.pass_time(101)
        queue.fire_timers()

        assert look(queue).is_closed
        assert queue.client.pttl(queue.keys.key("batch", "b")) > 0


class TestGivenABatchThatIsCancelled:
    def test_when_its_jobs_wait_run_or_are_delayed_then_they_alone_are_cancelled(self, queue: Queue) -> None:
        running = queue.add("running", batch="b")
        worker = queue.worker("A")
        job = worker.take()
        waiting = queue.add("waiting", batch="b")
        later = queue.add("later", batch="b", not_before_ms=9_999_999_999_999)
        other, stranger = queue.add("other", batch="c"), queue.add("stranger")

        assert cancel(queue, reason="wrong file") == (2, 1, False)

        assert [queue.state(one) for one in (waiting, later)] == [JobState.CANCELLED] * 2
        assert queue.view(waiting).error == "wrong file"
        assert [queue.state(one) for one in (other, stranger)] == [JobState.QUEUED] * 2
        assert worker.beat(running).stops == ((running, JobState.CANCELLED),)
        assert callbacks(queue) == []
        worker.advance(ending(job, 0, 2, state=JobState.CANCELLED))
        view = look(queue)
        assert (view.is_closed, view.total, view.cancelled, view.ended) == (True, 3, 3, 3)
        assert queue.view(running).error == "wrong file"
        assert callbacks(queue) == ["b"]
        assert queue.names("members:b") == set()
        check(queue)

    def test_when_it_is_large_then_it_goes_in_bites_and_no_job_is_looked_at_twice(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i:02}", batch="b") for i in range(80)])
        queue.worker("A").pull(sequences=20)

        slices = [cancel(queue) for _ in range(3)]

        assert [one[2] for one in slices] == [True, True, False]
        assert [one[0] + one[1] for one in slices] == [limits.SLICE_JOBS, limits.SLICE_JOBS, 16]
        assert (sum(one[0] for one in slices), sum(one[1] for one in slices)) == (60, 20)
        assert cancel(queue) == (0, 0, False)
        assert set(members(queue).values()) == {1.0}
        check(queue)

    def test_when_it_is_cancelled_then_it_takes_no_more_jobs(self, queue: Queue) -> None:
        queue.add("a", batch="b")
        cancel(queue)

        (answer,) = queue.submit(new_job("late", batch="b"))

        assert isinstance(answer, Refused)
        assert answer.reason == "batch_closed"

    def test_when_jobs_are_suspects_given_back_or_wait_for_a_retry_then_they_end_too(self, queue: Queue) -> None:
        ids = [queue.add(name, batch="b") for name in ("suspect", "retried", "returned")]
        for name in "AB":
            queue.worker(name).pull(sequences=1, is_empty=True)
            queue.pass_time(5000)
        worker = queue.worker("C")
        held = {job.id: job for number in (1, 2) for job in worker.pull(number=number).jobs}
        assert queue.look().suspects == 1
        worker.advance(ending(held[ids[1]], 0, 1, state=JobState.FAILED, retry_in_ms=60_000))
        worker.give_back(held[ids[2]])

        assert cancel(queue) == (3, 0, False)

        assert [queue.state(one) for one in ids] == [JobState.CANCELLED] * 3
        assert queue.names("members:b") | queue.names("timers") | queue.names("suspects") == set()
        check(queue)

    def test_when_a_running_job_was_asked_and_its_worker_dies_then_it_ends(self, queue: Queue) -> None:
        job_id = queue.add("a", batch="b")
        queue.worker("A").take()
        cancel(queue)
        queue.pass_time(5000)

        assert queue.worker("B").pull().jobs == ()
        assert queue.state(job_id) is JobState.CANCELLED
        assert callbacks(queue) == ["b"]
        check(queue)

    def test_when_it_is_unknown_or_empty_then_it_is_closed_and_complete(self, queue: Queue) -> None:
        assert cancel(queue, "nobody") == (0, 0, False)
        assert look(queue, "nobody").is_closed
        assert callbacks(queue) == ["nobody"]

    def test_when_a_foreign_key_is_at_its_job_list_then_it_is_noted_as_garbage(self, queue: Queue) -> None:
        queue.client.set(queue.keys.key("members", "b"), "mine")
        job_id = queue.add("a", batch="b")

        assert cancel(queue) == (0, 0, False)
        assert queue.state(job_id) is JobState.QUEUED
        assert queue.client.xlen(queue.keys.key("garbage")) == 2
        assert queue.cancel(job_id) == ["cancelled"]
        assert callbacks(queue) == ["b"]
        check(queue)


class TestGivenABatchWithADeadline:
    def test_when_it_passes_then_what_waits_expires_and_what_runs_is_asked(self, queue: Queue) -> None:
        running = queue.add("running", batch="b")
        worker = queue.worker("A")
        job = worker.take()
        waiting, other = queue.add("waiting", batch="b"), queue.add("other", batch="c")
        assert expire(queue, 10_000).deadline_ms == queue.now_ms + 10_000
        queue.pass_time(9999)
        worker.beat(running)
        assert queue.state(waiting) is JobState.QUEUED
        queue.pass_time(1)

        worker.beat(running)

        assert worker.beat(running).stops == ((running, JobState.EXPIRED),)
        view = queue.view(waiting)
        assert (view.state, view.error_code) == (JobState.EXPIRED, "deadline")
        assert queue.state(other) is JobState.QUEUED
        worker.advance(ending(job, 0, 1, state=JobState.EXPIRED))
        assert (look(queue).expired, callbacks(queue)) == (2, ["b"])
        assert queue.names("timers") == set()
        check(queue)

    def test_when_it_is_large_then_each_call_that_fires_timers_ends_a_bite(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i:02}", batch="b") for i in range(40)])
        queue.submit(*[new_job(f"k{i:02}", batch="c") for i in range(40)])
        expire(queue, 0, "b")
        expire(queue, 0, "c")

        left: list[int] = []
        for _ in range(4):
            queue.fire_timers()
            queue.pass_time(1)
            left.append(queue.look().waiting_jobs)

        assert left == [48, 16, 0, 0]
        assert sorted(callbacks(queue)) == ["b", "c"]
        assert queue.names("timers") == set()
        check(queue)

    def test_when_a_pull_comes_first_then_it_starts_none_of_them(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i}", batch="b") for i in range(3)])
        expire(queue, 5)
        queue.pass_time(5)

        assert queue.worker("A").pull().jobs == ()
        assert look(queue).expired == 3
        check(queue)

    def test_when_it_has_more_than_a_bite_then_a_pull_starts_none_of_the_rest(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i:02}", batch="b") for i in range(70)], new_job("other"))
        expire(queue, 5)
        queue.pass_time(5)
        worker = queue.worker("A")

        taken: list[JobId] = []
        for _ in range(4):
            taken += [job.id for job in worker.pull().jobs]
            queue.pass_time(1)

        assert taken == ["0.t.other"]
        assert look(queue).expired == 70
        check(queue)

    def test_when_a_failed_job_is_requeued_after_it_then_the_deadline_does_not_apply(self, queue: Queue) -> None:
        job_id = queue.add("a", batch="b")
        expire(queue, 10)
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, 1, state=JobState.FAILED))
        queue.pass_time(10)
        queue.fire_timers()

        queue.requeue(job_id)

        assert worker.take().id == job_id
        check(queue)

    def test_when_a_failed_job_of_it_is_requeued_before_it_then_it_holds(self, queue: Queue) -> None:
        job_id = queue.add("a", batch="b")
        expire(queue, 10)
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, 1, state=JobState.FAILED))
        queue.run(calls.close_batch(queue.keys, "b"))
        queue.requeue(job_id)
        queue.pass_time(10)

        queue.fire_timers()

        assert queue.state(job_id) is JobState.EXPIRED
        check(queue)

    def test_when_all_has_ended_before_then_its_timer_goes(self, queue: Queue) -> None:
        queue.add("a", batch="b")
        expire(queue, 10_000)
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, 1))
        queue.run(calls.close_batch(queue.keys, "b"))

        assert queue.names("timers") == set()
        assert expire(queue, 10).deadline_ms is not None
        assert queue.names("timers") == set()
        assert callbacks(queue) == ["b"]

    def test_when_it_was_forgotten_meanwhile_then_nothing_happens(self, queue: Queue) -> None:
        expire(queue, 10)
        queue.client.delete(queue.keys.key("batch", "b"))
        queue.pass_time(10)

        assert queue.fire_timers() == 1
        assert queue.names("batch:*") | queue.names("timers") == set()


@pytest.mark.every_server
class TestGivenTheLastEndsOfABatch:
    """Every order of what may come last: it completes once, and says so once to whom it concerns."""

    def acts(self, queue: Queue, worker: Worker) -> dict[str, Act]:
        first, second = worker.pull(sequences=2).jobs
        close = calls.close_batch(queue.keys, "b", callback_url="https://x/y")
        return {
            "done": lambda: worker.advance(ending(first, 0, 2)),
            "failed": lambda: worker.advance(ending(second, 0, 1, state=JobState.FAILED)),
            "close": lambda: queue.run(close),
            "cancel": lambda: cancel(queue),
            "expire": lambda: (expire(queue, -1), queue.fire_timers()),
        }

    @pytest.mark.parametrize("order", list(permutations(("done", "failed", "close", "cancel"))), ids=",".join)
    def test_when_they_come_in_any_order_and_twice_then_one_callback_has_right_totals(
        self, queue: Queue, order: tuple[str, ...]
    ) -> None:
        for name in ("done", "failed", "waiting"):
            queue.add(name, batch="b")
        acts = self.acts(queue, queue.worker("A"))

        for name in order:
            acts[name]()
            acts[name]()

        view = look(queue)
        assert (view.done, view.failed, view.cancelled, view.ended) == (1, 1, 1, 3)
        webhooks = {f[b"url"]: f for _, f in queue.entries(queue.keys.callbacks) if f[b"kind"] == b"batch"}
        # Where the cancel had closed and completed it before, that was said too: there may be an export without a URL.
        assert len(webhooks) == len(callbacks(queue)) <= 2
        fields = webhooks[b"https://x/y"]
        assert [int(fields[name]) for name in (b"total", b"done", b"failed", b"cancelled")] == [3, 1, 1, 1]
        assert queue.names("members:*") == set()
        check(queue)

    @pytest.mark.parametrize("order", list(permutations(("done", "failed", "expire"))), ids=",".join)
    def test_when_its_deadline_is_among_them_then_the_same_holds(self, queue: Queue, order: tuple[str, ...]) -> None:
        for name in ("done", "failed", "waiting"):
            queue.add(name, batch="b")
        acts = self.acts(queue, queue.worker("A"))

        for name in order:
            acts[name]()
            acts[name]()

        view = look(queue)
        assert (view.done, view.failed, view.expired) == (1, 1, 1)
        assert callbacks(queue) == ["b"]
        check(queue)


class TestGivenABatchThatIsComplete:
    def complete(self, queue: Queue, url: str | None = None) -> None:
        queue.configure(export_batches=False)
        queue.add("a", batch="b")
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0, 1))
        self.close(queue, url)

    def close(self, queue: Queue, url: str | None) -> BatchView:
        return queue.run(calls.close_batch(queue.keys, "b", callback_url=url))

    def urls(self, queue: Queue) -> list[bytes]:
        return [f[b"url"] for _, f in queue.entries(queue.keys.callbacks)]

    def test_when_it_is_closed_again_with_a_url_then_that_one_gets_it_once(self, queue: Queue) -> None:
        self.complete(queue)
        completed_ms = look(queue).completed_ms
        queue.pass_time(1000)

        views = [self.close(queue, "https://x/y") for _ in range(2)]

        assert self.urls(queue) == [b"https://x/y"]
        assert [view.completed_ms for view in views] == [completed_ms] * 2
        check(queue)

    def test_when_one_url_got_it_and_another_is_given_then_both_get_it(self, queue: Queue) -> None:
        self.complete(queue, "https://x/y")

        self.close(queue, "https://x/z")
        self.close(queue, None)

        assert self.urls(queue) == [b"https://x/y", b"https://x/z"]


class TestGivenAFailedJobOfABatch:
    def failed(self, queue: Queue) -> JobId:
        job_id = queue.add("a", batch="b")
        worker = queue.worker("A")
        job = worker.take()
        worker.advance(tokens(job, 0, 1), ending(job, 1, state=JobState.FAILED))
        queue.run(calls.close_batch(queue.keys, "b"))
        return job_id

    def test_when_it_is_requeued_then_its_batch_is_open_again_and_can_be_cancelled(self, queue: Queue) -> None:
        job_id = self.failed(queue)
        queue.requeue(job_id)
        assert (look(queue).failed, look(queue).completed_ms) == (0, None)

        assert cancel(queue) == (1, 0, False)

        assert queue.state(job_id) is JobState.CANCELLED
        assert (look(queue).cancelled, look(queue).ended, len(callbacks(queue))) == (1, 1, 2)
        check(queue)

    def test_when_its_batch_is_forgotten_then_a_requeue_does_not_bring_it_back(self, queue: Queue) -> None:
        job_id = self.failed(queue)
        queue.client.delete(queue.keys.key("batch", "b"))

        assert queue.requeue(job_id) == [True]

        assert queue.names("batch:*") | queue.names("members:*") == set()


class TestGivenAnOpenBatch:
    """No job of it waits or runs."""

    def test_when_results_are_forgotten_then_its_counts_are_kept_for_the_jobs_to_come(self, queue: Queue) -> None:
        queue.configure(result_ttl_ms=1000, export_batches=False)
        queue.add("a", batch="b")
        worker = queue.worker("A")
        worker.advance(ending(worker.take(), 0))

        assert queue.client.pttl(queue.keys.key("batch", "b")) > limits.DEAD_TTL_S * 999

        queue.run(calls.close_batch(queue.keys, "b"))
        assert queue.client.pttl(queue.keys.key("batch", "b")) <= 1000
