"""A queue with more workers than one call lists: what each of them serves and tells counts."""

from collections.abc import Mapping

import pytest

from sluice.protocol import calls
from sluice.protocol.limits import ASIDE_MS, FIELDS_PER_PAGE, WORKERS_PER_PAGE
from sluice.protocol.redis.execution import run_many
from sluice.protocol.redis.surveys import pages_of_workers, survey
from sluice.protocol.scaling.backlog import BACKLOG_FIELDS, backlog_of
from tests.protocol.costs import Cost, cost_of
from tests.protocol.driving import Queue, Worker, new_job, short
from tests.protocol.settings.test_two_models import asking_for, beat
from tests.protocol.test_costs import pull

MANY = 3 * WORKERS_PER_PAGE
ABOUT = {"model": "large", "tokens_per_s": "2", "capacity_tokens_per_s": "10", "held_tokens": "7", "state": "pulling"}


def start(queue: Queue, num_workers: int, *, about: Mapping[str, str] = ABOUT, expiry_ms: int = 4000) -> None:
    """Beat once for each of many workers."""
    beats = [
        calls.Beat(incarnation=f"{number:05d}", held=(), processed_pull=0, expiry_ms=expiry_ms, about=about)
        for number in range(num_workers)
    ]
    run_many(queue.client, [calls.beat(queue.keys, one) for one in beats])


@pytest.fixture
def last(one_queue: Queue) -> Worker:
    """The only worker of the model `small`: its heartbeat expires after those of many others."""
    start(one_queue, MANY)
    worker = one_queue.worker("last")
    one_queue.pass_time(100)
    beat(worker, "small")
    return worker


class TestGivenManyWorkersOfAnotherModel:
    def test_when_one_pulls_then_it_costs_as_much_as_among_few(self, one_queue: Queue) -> None:
        costs: list[Cost] = []
        for num_workers in (2, MANY):
            one_queue.client.flushall()
            one_queue.step_clock(0)
            start(one_queue, num_workers)
            beat(one_queue.worker("A"), "large")
            beat(one_queue.worker("last"), "small")
            one_queue.add("a", spec=asking_for("small"))
            costs.append(cost_of(one_queue, pull(one_queue)))

        few, many = costs
        assert many == few

    def test_when_one_pulls_a_job_for_the_last_then_it_is_set_aside(self, one_queue: Queue, last: Worker) -> None:
        one = one_queue.add("a", spec=asking_for("small"))

        assert one_queue.worker("00000").pull().jobs == ()

        assert one_queue.view(one).attempt == 0
        one_queue.pass_time(ASIDE_MS)
        assert short(last.pull().jobs) == ["a"]

    def test_when_the_last_has_died_then_another_takes_its_job(self, one_queue: Queue, last: Worker) -> None:
        del last
        one_queue.add("a", spec=asking_for("small"))
        for _ in range(5):
            one_queue.pass_time(1000)
            beat(one_queue.worker("00000"), "large")

        assert short(one_queue.worker("00000").pull().jobs) == ["a"]
        assert one_queue.look().models == ("large",)

    def test_when_another_program_left_a_key_there_then_the_next_heartbeat_replaces_it(
        self, one_queue: Queue, last: Worker
    ) -> None:
        for name in ("models", "serving:small"):
            one_queue.client.set(one_queue.keys.key(name), "foreign")
        one_queue.add("a", spec=asking_for("small"))

        assert one_queue.worker("00000").pull().jobs == ()
        beat(last, "small")

        assert one_queue.look().models == ("small",)


class TestGivenManyWorkers:
    @pytest.fixture(autouse=True)
    def workers(self, one_queue: Queue) -> None:
        start(one_queue, MANY)

    def test_when_the_queue_is_read_then_all_are_counted_and_summed_up(self, one_queue: Queue) -> None:
        view = one_queue.look()

        assert (view.num_workers, len(view.workers), view.tokens_per_s) == (MANY, MANY, 2.0 * MANY)
        assert view.models == ("large",)

    def test_when_its_backlog_is_read_then_it_is_of_all(self, one_queue: Queue) -> None:
        start(one_queue, 1, about={**ABOUT, "capacity_tokens_per_s": str(10 + MANY)})

        found = backlog_of("q", [survey(one_queue.client, one_queue.keys, fields=BACKLOG_FIELDS)])

        assert (found.workers, found.running_tokens, found.worker_tokens_per_s) == (MANY, 7 * MANY, 11.0)

    def test_when_they_are_listed_then_each_page_is_small_and_dead_ones_are_left_out(self, one_queue: Queue) -> None:
        one_queue.pass_time(3900)
        start(one_queue, 250)
        one_queue.pass_time(200)

        pages = list(pages_of_workers(one_queue.client, one_queue.keys, fields=("held", "state", "nothing")))

        # Hash buckets are read whole, so a page may have a few more.
        assert max(map(len, pages)) <= 2 * max(WORKERS_PER_PAGE, FIELDS_PER_PAGE // 3)
        listed = {name: about for page in pages for name, about in page.items()}
        assert listed == {f"{number:05d}": {"held": "0", "state": "pulling"} for number in range(250)}

    def test_when_their_cursor_is_no_number_then_the_call_is_refused(self, one_queue: Queue) -> None:
        call = calls.list_workers(one_queue.keys)
        [answer] = run_many(one_queue.client, [calls.Call(call.script, call.keys, ("x",), call.parse)])

        assert "wrong arguments" in str(answer)


class TestGivenManyDelayedJobs:
    def test_when_more_are_due_than_one_look_reads_then_they_count_as_the_first_do(self, one_queue: Queue) -> None:
        for tenth in range(10):
            names = [f"{tenth}-{i}" for i in range(250)]
            one_queue.submit(*[new_job(name, not_before_ms=one_queue.now_ms + 10) for name in names])
        one_queue.pass_time(20)

        assert one_queue.look().due_jobs == 2500

    def test_when_a_deadline_is_behind_many_others_then_it_is_found(self, one_queue: Queue) -> None:
        one_queue.submit(*[new_job(f"{i}", not_before_ms=one_queue.now_ms + 10) for i in range(250)])
        one_queue.add("late", deadline_ms=one_queue.now_ms + 5000)

        assert one_queue.look().deadline_ms == one_queue.now_ms + 5000
