"""`producer follow`: the progress of a batch, from a process that did not submit it."""

import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.producer.cli import follow
from sluice.producer.cli.follow import BatchEnd, Rate
from sluice.producer.client import Producer
from sluice.protocol.calls import BatchView
from sluice.protocol.states import JobState
from tests.producer.commands import Ended, Run
from tests.producer.worker_side import HandWorker


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often."""
    monkeypatch.setattr(follow, "EVERY_S", 0.02)


OPEN = "the batch is still open: producer batches close nightly\n"


def submit(producer: Producer, count: int) -> None:
    for number in range(count):
        producer.submit(f"prompt {number}", batch="nightly")


def view_of(total: int) -> BatchView:
    """An open batch whose jobs are done."""
    return BatchView(
        id="b", is_closed=False, total=total, done=total, failed=0, cancelled=0, expired=0, completed_ms=None
    )


class TestGivenABatch:
    def test_when_all_of_it_is_done_then_it_says_so_and_exits_with_0(
        self, run: Run, producer: Producer, worker: HandWorker
    ) -> None:
        submit(producer, 2)
        for leased in worker.pull():
            worker.generate(leased)

        producer.close_batch("nightly")

        assert run("follow", "nightly") == Ended(0, "2/2  2 done\n", "")

    def test_when_a_job_of_it_failed_then_the_code_is_1(self, run: Run, producer: Producer, worker: HandWorker) -> None:
        submit(producer, 2)
        first, second = worker.pull()
        worker.generate(first)
        worker.say(second, [], "", end=JobState.FAILED, error="broken", code="broken")

        ended = run("follow", "nightly", "--json", "--more-within", "0")

        assert ended.code == 1
        shown = json.loads(ended.out)
        assert {name: shown[name] for name in ("total", "done", "failed")} == {"total": 2, "done": 1, "failed": 1}

    def test_when_it_goes_on_meanwhile_then_each_change_is_a_line(
        self, run: Run, producer: Producer, worker: HandWorker
    ) -> None:
        submit(producer, 3)
        producer.close_batch("nightly")

        def work() -> None:
            for leased in worker.pull():
                time.sleep(0.2)
                worker.generate(leased)

        working = threading.Thread(target=work)
        working.start()
        ended = run("follow", "nightly")
        working.join()

        assert [line.split()[0] for line in ended.out.splitlines()] == ["0/3", "1/3", "2/3", "3/3"]
        assert "/s" in ended.out.splitlines()[-1]


class TestGivenAnOpenBatchWhosePresentJobsHaveEnded:
    def test_when_more_come_then_it_is_followed_until_it_is_closed(
        self, run: Run, producer: Producer, worker: HandWorker
    ) -> None:
        def finish() -> None:
            for leased in worker.pull():
                worker.generate(leased)

        def go_on() -> None:
            submit(producer, 2)
            finish()
            producer.close_batch("nightly")

        submit(producer, 1)
        finish()
        more = threading.Timer(0.3, go_on)  # the others come after the first look

        more.start()
        ended = run("follow", "nightly")
        more.join()

        lines = ended.out.splitlines()
        assert (ended.code, lines[-1].split()[0]) == (0, "3/3")

    def test_when_none_come_within_the_time_then_it_ends_and_says_that_it_is_open(
        self, run: Run, producer: Producer, worker: HandWorker
    ) -> None:
        submit(producer, 1)
        for leased in worker.pull():
            worker.generate(leased)

        assert run("follow", "nightly", "--more-within", "0.1") == Ended(0, "1/1  1 done\n", OPEN)

    @given(st.lists(st.tuples(st.floats(0.1, 9), st.integers(0, 3)), min_size=1, max_size=20))
    def test_when_it_is_over_then_no_job_came_for_the_whole_time(self, looks: list[tuple[float, int]]) -> None:
        end, now_s, total, came_s = BatchEnd(10.0), 0.0, 1, 0.0

        for passed_s, more in looks:
            now_s, total = now_s + passed_s, total + more
            came_s = now_s if more or now_s == passed_s else came_s
            assert end.is_over(view_of(total), now_s) is (now_s - came_s >= 10.0)


class TestGivenABatchThatIsUnknown:
    def test_when_it_is_followed_then_that_is_said(self, run: Run) -> None:
        ended = run("follow", "nowhere")

        assert ended.code == 1
        assert "nowhere" in ended.err


class TestGivenLooks:
    @given(st.lists(st.tuples(st.floats(0.1, 20), st.integers(0, 50)), min_size=2, max_size=30))
    def test_when_a_rate_is_taken_then_it_is_between_the_slowest_and_the_fastest(
        self, looks: list[tuple[float, int]]
    ) -> None:
        rate, now_s, num_ended = Rate(), 0.0, 0
        last = rate.per_s(0, 0.0)

        for passed_s, more in looks:
            now_s, num_ended = now_s + passed_s, num_ended + more
            last = rate.per_s(num_ended, now_s)

        assert last is not None
        single = [more / passed_s for passed_s, more in looks]
        assert min(single) - 1e-6 <= last <= max(single) + 1e-6
