"""One queue whose workers serve two models: a job that names one of them waits for a worker that serves it."""

import pytest

from sluice.protocol import calls
from sluice.protocol.limits import ASIDE_EACH_MS, ASIDE_MS
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobOptions, JobSpec, encode_spec
from tests.protocol.driving import Queue, Worker, check, new_job, short, tokens


def asking_for(model: str | None) -> bytes:
    """The spec of a job that names a model."""
    return encode_spec(JobSpec(model=model, options=JobOptions(max_tokens=20, logit_bias={5: 1.0})))


def beat(worker: Worker, model: str, *held: JobId, adapters: str = "") -> None:
    """A heartbeat of a worker that serves a model, and adapters to it."""
    about = {"model": model} | ({"adapters": adapters} if adapters else {})
    beat = calls.Beat(incarnation=worker.name, held=held, processed_pull=worker.number, expiry_ms=4000, about=about)
    worker.queue.run(calls.beat(worker.queue.keys, beat))


@pytest.fixture
def small(queue: Queue) -> Worker:
    """A worker that serves the model `small`."""
    worker = queue.worker("S")
    beat(worker, "small")
    return worker


@pytest.fixture
def large(queue: Queue) -> Worker:
    """A worker that serves the model `large`."""
    worker = queue.worker("L")
    beat(worker, "large")
    return worker


class TestGivenWorkersOfTwoModels:
    def test_when_a_job_names_one_then_only_its_worker_takes_it(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        one = queue.add("a", spec=asking_for("large"))

        assert small.pull().jobs == ()
        assert (queue.state(one), queue.view(one).attempt) == (JobState.QUEUED, 0)
        check(queue)
        queue.pass_time(ASIDE_MS)

        job = large.take()

        assert (job.id, job.attempt) == (one, 1)
        assert [event.kind for event in queue.events(one)] == ["submitted", "started"]
        check(queue)

    def test_when_it_names_an_adapter_then_only_the_worker_that_has_it_takes_it(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        beat(large, "large", adapters="legal medical")
        one = queue.add("a", spec=asking_for("medical"))

        assert small.pull().jobs == ()
        queue.pass_time(ASIDE_MS)

        assert large.take().id == one
        check(queue)

    @pytest.mark.parametrize("model", ["small", "of nobody", None])
    def test_when_it_names_its_own_or_that_of_nobody_or_none_then_it_is_taken(
        self, queue: Queue, small: Worker, large: Worker, model: str | None
    ) -> None:
        del large
        queue.add("a", spec=asking_for(model))

        assert short(small.pull().jobs) == ["a"]

    def test_when_the_last_worker_of_the_model_dies_then_another_takes_its_jobs(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        queue.add("a", spec=asking_for("large"))
        job = large.take()
        large.advance(tokens(job, 0, 3))
        queue.add("b", spec=asking_for("large"))
        assert small.pull().jobs == ()
        for _ in range(5):
            queue.pass_time(1000)
            beat(small, "small")

        assert sorted(short(small.pull().jobs)) == ["a", "b"]

    def test_when_one_of_two_workers_of_the_model_dies_then_the_other_gets_its_job(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        second = queue.worker("L2")
        queue.add("a", spec=asking_for("large"))
        large.take()
        for _ in range(5):
            queue.pass_time(1000)
            beat(small, "small")
            beat(second, "large")

        assert small.pull().jobs == ()

        check(queue)
        queue.pass_time(ASIDE_MS)
        assert short(second.pull().jobs) == ["a"]

    def test_when_a_worker_with_a_shorter_life_serves_it_too_then_the_longer_one_counts(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        one = queue.add("a", spec=asking_for("large"))
        short_lived = calls.Beat(incarnation="L2", held=(), processed_pull=0, expiry_ms=1000, about={"model": "large"})
        queue.run(calls.beat(queue.keys, short_lived))
        queue.pass_time(2000)

        assert queue.look().models == ("large", "small")
        assert small.pull().jobs == ()

        queue.pass_time(ASIDE_MS)
        assert large.take().id == one

    @pytest.mark.parametrize("leave", ["deregister", "report"])
    def test_when_the_last_worker_of_the_model_leaves_then_another_takes_its_jobs_at_once(
        self, queue: Queue, small: Worker, large: Worker, leave: str
    ) -> None:
        queue.add("a", spec=asking_for("large"))
        if leave == "deregister":
            large.give_back(deregister=True)
        else:
            queue.run(calls.report_death(queue.keys, large.name))

        assert queue.look().models == ("small",)
        assert short(small.pull().jobs) == ["a"]

    def test_when_jobs_of_both_wait_then_those_of_the_other_hold_up_none(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        del large
        names = [f"{kind}{i}" for i in range(40) for kind in ("large", "small")]
        queue.submit(*[new_job(name, spec=asking_for(name[:5])) for name in names])

        taken = [name for _ in range(4) for name in short(small.pull().jobs)]

        assert taken == [f"small{i}" for i in range(40)]
        check(queue)

    def test_when_a_job_does_not_fit_and_is_of_another_then_the_next_ones_go_on(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        del large
        queue.add("big", spec=asking_for("large"), prompt_tokens=5000)
        queue.add("a", spec=asking_for("small"))

        reply = small.pull(kv_tokens=1000)

        assert (reply.has_more, reply.jobs) == (True, ())
        assert short(small.pull(kv_tokens=1000).jobs) == ["a"]

    def test_when_many_wait_for_another_model_then_each_waits_longer(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        """Looking at them costs the server the same, however many there are."""
        many = 2 * ASIDE_MS // ASIDE_EACH_MS
        queue.stop_clock()
        beat(small, "small")
        beat(large, "large")
        queue.submit(*[new_job(f"j{i}", spec=asking_for("large")) for i in range(many)])
        while small.pull().has_more:
            pass

        now_ms = queue.look().server_ms
        due_ms = sorted(due for _, due in queue.client.zrange(queue.keys.key("timers"), 0, -1, withscores=True))
        assert due_ms[0] - now_ms <= ASIDE_MS
        assert due_ms[-1] - now_ms == ASIDE_EACH_MS * (many - 1)

    def test_when_it_is_due_again_then_it_waits_in_its_own_class(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        queue.add("low", spec=asking_for("large"), priority=0)
        small.pull()
        queue.add("high", priority=9)
        queue.pass_time(ASIDE_MS)

        assert short(large.pull(sequences=1).jobs) == ["high"]

    def test_when_its_spec_is_not_readable_then_any_worker_takes_it(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        del large
        for number, spec in enumerate(
            [b"\xa5model", b"\x91" * 300 + b"\xa5model", b"\x92\x01\xa5model", b"\xc1\xa5model"]
        ):
            queue.add(f"a{number}", spec=spec)

        assert len(small.pull().jobs) == 4
