"""One queue whose workers have different engines: what one of them declines is left for the other."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.protocol import calls
from sluice.protocol.limits import ASIDE_MS
from sluice.protocol.offers import Offer
from sluice.protocol.sampling import FEATURES
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobSpec, encode_spec
from tests.protocol.driving import Queue, Worker, check, new_job, short

LIFE_MS = 4000


def offer_of(engine: str, *features: str) -> str:
    return str(
        Offer(engine=engine, exactness="bitwise", features=features, refused=(), families=("llama",), weights=())
    )


def beat(worker: Worker, offer: str, *, model: str = "m") -> None:
    """A heartbeat of a worker with an engine; it holds what it has taken."""
    held = tuple(job for job in worker.queue.hash_of("held", worker.name))
    about = {"model": model, "offer": offer}
    beat = calls.Beat(incarnation=worker.name, held=held, processed_pull=worker.number, expiry_ms=LIFE_MS, about=about)  # pyright: ignore[reportArgumentType]  # ids as text
    worker.queue.run(calls.beat(worker.queue.keys, beat))


def decline(worker: Worker, job: calls.LeasedJob) -> calls.Declined:
    returned = calls.Returned(job_id=job.id, epoch=job.epoch)
    return worker.queue.run(calls.decline(worker.queue.keys, worker.name, returned))


FULL, LEAN = offer_of("full 1", *FEATURES), offer_of("lean 1", "logprobs")


@pytest.fixture
def full(queue: Queue) -> Worker:
    """A worker whose engine has every feature."""
    worker = queue.worker("F")
    beat(worker, FULL)
    return worker


@pytest.fixture
def lean(queue: Queue) -> Worker:
    """A worker whose engine has one feature."""
    worker = queue.worker("L")
    beat(worker, LEAN)
    return worker


class TestGivenAWorkerThatOffersLess:
    def test_when_a_job_needs_more_then_the_submit_names_the_feature(self, queue: Queue, lean: Worker) -> None:
        del lean

        refused, taken = queue.submit(
            new_job("a", features=("logprobs", "choices")), new_job("b", features=("logprobs",))
        )

        assert isinstance(refused, calls.Refused)
        assert (refused.reason, refused.message) == ("feature", "no worker of this queue offers choices")
        assert isinstance(taken, calls.Accepted)

    def test_when_one_that_offers_more_joins_then_the_job_is_taken(self, queue: Queue, lean: Worker) -> None:
        del lean
        beat(queue.worker("F"), FULL)

        queue.add("a", features=("choices",))

    def test_when_one_that_offers_more_dies_then_the_job_is_refused_again(
        self, queue: Queue, lean: Worker, full: Worker
    ) -> None:
        del full
        for _ in range(5):
            queue.pass_time(1000)
            beat(lean, LEAN)

        (refused,) = queue.submit(new_job("a", features=("choices",)))

        assert isinstance(refused, calls.Refused)
        assert queue.look().offers == {"m": (LEAN,)}

    def test_when_all_die_then_the_jobs_that_the_last_ones_took_wait(
        self, queue: Queue, lean: Worker, full: Worker
    ) -> None:
        del lean, full
        queue.pass_time(2 * LIFE_MS)

        queue.add("a", features=("choices",))

    @given(living=st.lists(st.sets(st.sampled_from(FEATURES)), min_size=1, max_size=4))
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
    def test_when_any_engines_live_then_the_features_are_those_of_at_least_one(
        self, one_queue: Queue, living: list[set[str]]
    ) -> None:
        queue = one_queue
        queue.client.flushdb()
        for number, features in enumerate(living):
            beat(queue.worker(f"W{number}"), offer_of(f"e{number}", *sorted(features)))

        answers = queue.submit(*[new_job(feature, features=(feature,)) for feature in FEATURES])

        accepted = {name for name, one in zip(FEATURES, answers, strict=True) if isinstance(one, calls.Accepted)}
        assert accepted == set[str]().union(*living)


class TestGivenAJobThatOneEngineDeclines:
    """The other's worker lives."""

    def test_when_it_is_declined_then_only_the_other_takes_it(self, queue: Queue, lean: Worker, full: Worker) -> None:
        one = queue.add("a")

        assert decline(lean, lean.take()) == "returned"
        assert [event.fields["why"] for event in queue.events(one) if event.kind == "returned"] == [b"declined"]
        check(queue)
        assert lean.pull().jobs == ()
        queue.pass_time(ASIDE_MS)
        beat(full, FULL)

        assert (job := full.take()).id == one
        assert job.attempt == 2
        check(queue)

    def test_when_another_worker_of_the_same_engine_pulls_then_it_sets_it_aside(
        self, queue: Queue, lean: Worker, full: Worker
    ) -> None:
        del full
        second = queue.worker("L2")
        beat(second, LEAN)
        queue.add("a")
        decline(lean, lean.take())

        assert second.pull().jobs == ()

    def test_when_the_other_has_died_then_the_first_takes_it_and_keeps_it(
        self, queue: Queue, lean: Worker, full: Worker
    ) -> None:
        del full
        one = queue.add("a")
        decline(lean, lean.take())
        for _ in range(5):
            queue.pass_time(1000)
            beat(lean, LEAN)

        job = lean.take()

        assert decline(lean, job) == "kept"
        assert queue.state(one) is JobState.RUNNING
        check(queue)

    def test_when_the_other_declines_it_too_then_it_stays_with_its_worker(
        self, queue: Queue, lean: Worker, full: Worker
    ) -> None:
        queue.add("a")
        decline(lean, lean.take())

        assert decline(full, full.take()) == "kept"
        check(queue)

    def test_when_it_is_declined_twice_then_the_second_call_has_no_effect(
        self, queue: Queue, lean: Worker, full: Worker
    ) -> None:
        del full
        queue.add("a")
        job = lean.take()

        assert [decline(lean, job), decline(lean, job)] == ["returned", "lost"]
        check(queue)

    def test_when_the_queue_asks_for_its_end_then_it_ends(self, queue: Queue, lean: Worker, full: Worker) -> None:
        del full
        one = queue.add("a")
        job = lean.take()
        queue.cancel(one)

        assert decline(lean, job) == "returned"
        assert queue.state(one) is JobState.CANCELLED
        check(queue)


class TestGivenAnEngineOfAnotherModel:
    def test_when_a_job_names_its_model_then_that_engine_does_not_count(self, queue: Queue, lean: Worker) -> None:
        beat(queue.worker("O"), FULL, model="other")
        queue.add("a", spec=encode_spec(JobSpec(model="m")))

        assert decline(lean, lean.take()) == "kept"

    def test_when_a_job_names_no_model_then_it_counts(self, queue: Queue, lean: Worker) -> None:
        beat(queue.worker("O"), FULL, model="other")
        queue.add("a")

        assert decline(lean, lean.take()) == "returned"


class TestGivenForeignData:
    def test_when_the_key_of_offers_has_another_type_then_the_next_heartbeat_replaces_it(
        self, queue: Queue, lean: Worker
    ) -> None:
        queue.client.delete(queue.keys.key("offers"))
        queue.client.set(queue.keys.key("offers"), "foreign")
        queue.add("a")

        assert decline(lean, lean.take()) == "kept"
        beat(lean, LEAN)
        assert queue.look().offers == {"m": (LEAN,)}

    def test_when_an_offer_has_a_line_break_or_is_too_long_then_the_heartbeat_counts(self, queue: Queue) -> None:
        worker = queue.worker("W")
        beat(worker, "; features=logprobs\nother")
        beat(queue.worker("V"), "x" * 2000)

        assert queue.look().offers == {"m": ("; features=logprobs other",)}
        assert set(queue.look().workers) == {"W", "V"}

    def test_when_a_job_has_foreign_marks_then_it_is_not_a_job(self, queue: Queue, lean: Worker) -> None:
        one = queue.add("a")
        queue.write_fields(one, declined="x" * 5000)

        assert short(lean.pull().jobs) == []
