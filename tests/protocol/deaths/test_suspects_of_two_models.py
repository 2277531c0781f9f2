"""Only a worker that may take a suspect drains for it: one of its model, with a cache that is large enough."""

import pytest

from sluice.protocol import limits
from sluice.protocol.wire import JobId
from tests.protocol.deaths.test_suspects import kill
from tests.protocol.driving import Queue, Worker, check, short
from tests.protocol.settings.test_two_models import asking_for, beat


def make_suspects(queue: Queue, *models: str, prompt_tokens: int = 10) -> list[JobId]:
    """One job that names each model; both deaths of each are behind it, and it has waited for too long."""
    seen = [models[:number].count(model) for number, model in enumerate(models)]
    names = [f"for-{model}" + f"-{count}" * (count > 0) for model, count in zip(models, seen, strict=True)]
    ids = [
        queue.add(name, spec=asking_for(model), prompt_tokens=prompt_tokens)
        for name, model in zip(names, models, strict=True)
    ]
    kill(queue, "A", "B")
    queue.worker("C").pull()
    assert queue.look().suspects == len(models)
    queue.pass_time(int(limits.SUSPECT_WAIT_S * 1000) + 1)
    return ids


@pytest.fixture
def small(queue: Queue) -> Worker:
    """A worker that serves the model `small` once it beats."""
    return queue.worker("S")


@pytest.fixture
def large(queue: Queue) -> Worker:
    """A worker that serves the model `large` once it beats."""
    return queue.worker("L")


def beat_both(small: Worker, large: Worker) -> None:
    beat(small, "small")
    beat(large, "large")


class TestGivenASuspectThatHasWaitedTooLong:
    def test_when_workers_of_two_models_pull_then_the_one_of_its_model_drains(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        make_suspects(queue, "large")
        queue.add("innocent", spec=asking_for("small"))
        beat_both(small, large)

        other = small.pull()

        assert (short(other.jobs), other.drain_for_suspects) == (["innocent"], False)
        assert large.pull().drain_for_suspects
        assert not small.pull().drain_for_suspects
        assert short(large.pull(is_empty=True).jobs) == ["for-large"]
        assert queue.names("isolator") == set()
        check(queue)

    def test_when_it_costs_more_than_a_worker_s_cache_then_a_larger_one_drains(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        make_suspects(queue, "nobody", prompt_tokens=500)
        beat_both(small, large)

        assert not small.pull(kv_tokens=100, cache_tokens=100).drain_for_suspects
        assert large.pull().drain_for_suspects
        assert short(large.pull(is_empty=True).jobs) == ["for-nobody"]

    def test_when_the_first_one_is_of_another_model_then_a_worker_drains_for_the_second(
        self, queue: Queue, small: Worker, large: Worker
    ) -> None:
        make_suspects(queue, "large", "small")
        beat_both(small, large)

        assert small.pull().drain_for_suspects
        assert short(small.pull(is_empty=True).jobs) == ["for-small"]
        assert large.pull().drain_for_suspects


class TestGivenMoreSuspectsOfAnotherModelThanAPullLooksAt:
    @pytest.mark.parametrize("num_others", [9, 30])
    def test_when_a_worker_pulls_then_it_drains_for_its_own_until_it_takes_it(
        self, queue: Queue, small: Worker, large: Worker, num_others: int
    ) -> None:
        make_suspects(queue, *["large"] * num_others, "small")
        queue.add("innocent", spec=asking_for("small"))
        beat_both(small, large)
        pulls_needed = num_others // limits.MAX_SUSPECTS_PER_PULL

        drains = [small.pull(kv_tokens=0).drain_for_suspects for _ in range(pulls_needed + 3)]

        assert drains.index(True) < pulls_needed
        assert all(drains[drains.index(True) :])
        assert short(small.pull(is_empty=True).jobs) == ["for-small"]
        assert queue.names("isolator") == set()
        check(queue)

    def test_when_an_empty_worker_pulls_then_it_takes_its_own(self, queue: Queue, small: Worker, large: Worker) -> None:
        make_suspects(queue, *["large"] * 9, "small")
        beat_both(small, large)

        assert short(small.pull(is_empty=True).jobs) == ["for-small"]
        check(queue)


class TestGivenAWorkerThatDrains:
    @pytest.mark.parametrize("is_empty", [False, True])
    def test_when_the_suspect_that_it_could_take_has_ended_then_another_drains_at_once(
        self, queue: Queue, small: Worker, large: Worker, is_empty: bool
    ) -> None:
        _, for_small = make_suspects(queue, "large", "small")
        queue.add("innocent", spec=asking_for("small"))
        beat_both(small, large)
        assert small.pull().drain_for_suspects
        queue.cancel(for_small)

        reply = small.pull(is_empty=is_empty)

        assert (short(reply.jobs), reply.drain_for_suspects) == (["innocent"], False)
        assert queue.names("isolator") == set()
        assert large.pull().drain_for_suspects
        check(queue)


class TestGivenASuspectThatMustRunAloneAndIsTooLarge:
    def test_when_an_empty_worker_pulls_then_it_takes_the_next_suspect(self, queue: Queue, small: Worker) -> None:
        queue.add("large", prompt_tokens=500)
        kill(queue, "A", "B")
        queue.worker("C").pull()
        kill(queue, "D")  # it dies in isolation
        queue.add("next")
        for name in ("E", "F"):
            queue.worker(name).pull()
            queue.pass_time(5000)
        queue.worker("G").pull()
        assert queue.look().suspects == 2

        assert short(small.pull(is_empty=True, kv_tokens=100, cache_tokens=100).jobs) == ["next"]
        check(queue)
