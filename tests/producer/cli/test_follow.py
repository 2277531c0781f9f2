"""`producer follow`: the progress of a batch, from a process that did not submit it."""

import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.producer.cli import follow
from sluice.producer.cli.follow import Rate
from sluice.producer.client import Producer
from sluice.producer.contract.states import JobState
from tests.producer.commands import Ended, Run
from tests.producer.worker_side import HandWorker


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often."""
    monkeypatch.setattr(follow, "EVERY_S", 0.02)


def submit(producer: Producer, count: int) -> None:
    for number in range(count):
        producer.submit(f"prompt {number}", batch="nightly")


class TestGivenABatch:
    def test_when_all_of_it_is_done_then_it_says_so_and_exits_with_0(
        self, run: Run, producer: Producer, worker: HandWorker
    ) -> None:
        submit(producer, 2)
        for leased in worker.pull():
            worker.generate(leased)

        assert run("follow", "nightly") == Ended(0, "2/2  2 done\n", "")

    def test_when_a_job_of_it_failed_then_the_code_is_1(self, run: Run, producer: Producer, worker: HandWorker) -> None:
        submit(producer, 2)
        first, second = worker.pull()
        worker.generate(first)
        worker.say(second, [], "", end=JobState.FAILED, error="broken", code="broken")

        ended = run("follow", "nightly", "--json")

        assert ended.code == 1
        shown = json.loads(ended.out)
        assert {name: shown[name] for name in ("total", "done", "failed")} == {"total": 2, "done": 1, "failed": 1}

    def test_when_it_goes_on_meanwhile_then_each_change_is_a_line(
        self, run: Run, producer: Producer, worker: HandWorker
    ) -> None:
        submit(producer, 3)

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
