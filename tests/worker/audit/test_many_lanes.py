"""A partition with more lanes than a call counts: its counts are of one instant, or not used."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sluice.protocol import limits
from sluice.worker.audit import queue_side
from sluice.worker.audit.queue_side import QueueSide
from tests.protocol.driving import Queue, Worker, check, ending, new_job
from tests.servers import RedisServer

NUM_LANES = 2 * limits.LANES_PER_COUNT + 10

Change = Callable[[Queue, Worker], object]


def finish_one(queue: Queue, worker: Worker) -> None:
    """A job that runs ends, and another comes: as many wait as before."""
    del queue
    [job, *_] = worker.pull(sequences=1).jobs
    worker.advance(ending(job, 0, 1))


CHANGES: dict[str, Change] = {
    "submitted": lambda queue, _: queue.add("new", "t9"),
    "pulled": lambda _, worker: worker.pull(sequences=1),
    "cancelled": lambda queue, _: queue.cancel(new_job("j", "t9").id),
    "no longer delayed": lambda queue, worker: (queue.pass_time(60_000), worker.maintain()),
    "pulled and another submitted": lambda queue, worker: (worker.pull(sequences=1), queue.add("new", "t9")),
    "ended": finish_one,
}
"""What happens to a job between two calls of a count."""


@pytest.fixture
def wide(valkey: RedisServer) -> Iterator[Queue]:
    with valkey.client() as client:
        queue = Queue(client)
        queue.stop_clock()
        queue.submit(*[new_job("j", f"t{i}") for i in range(NUM_LANES)])
        queue.add("later", "t1", not_before_ms=queue.now_ms + 60_000)
        yield queue


def changing(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Let something happen before the last slice of each count."""
    plain = queue_side.audit_counts

    def audit_counts(keys: Any, lanes: Any, *, is_slice: bool = False) -> Any:  # Any: as the function in its place
        if 0 < len(lanes) < limits.LANES_PER_COUNT:
            change()
        return plain(keys, lanes, is_slice=is_slice)

    monkeypatch.setattr(queue_side, "audit_counts", audit_counts)


class TestGivenMoreLanesThanACallCounts:
    def test_when_nothing_changes_then_all_are_counted_and_nothing_is_found(self, wide: Queue) -> None:
        side = QueueSide(wide.client, wide.keys)

        counts = side.counts()

        assert counts.waiting_jobs == NUM_LANES + 1
        assert [*side.walk_waiting(), *side.wrong_counts(counts)] == []

    @pytest.mark.parametrize("change", CHANGES)
    def test_when_a_job_moves_during_a_count_then_it_is_made_again(
        self, wide: Queue, monkeypatch: pytest.MonkeyPatch, change: str
    ) -> None:
        worker, moves = wide.worker("A"), [CHANGES[change]]
        changing(monkeypatch, lambda: moves.pop()(wide, worker) if moves else None)

        counts = QueueSide(wide.client, wide.keys).counts()

        assert counts.waiting_jobs == wide.look().waiting_jobs == counts.counters["waiting_jobs"]

    def test_when_jobs_come_and_go_during_each_count_then_no_sum_is_known(
        self, wide: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker, numbers = wide.worker("A"), iter(range(100))
        changing(monkeypatch, lambda: (worker.pull(sequences=1), wide.add(f"new{next(numbers)}", "t9")))
        side = QueueSide(wide.client, wide.keys)

        found = [*side.walk_waiting(), *side.wrong_counts(side.counts())]

        assert found == []
        assert (side.counts().waiting_jobs, side.sums.stamp) == (None, "")

    def test_when_numbers_are_wrong_then_slices_of_a_repair_correct_them(self, wide: Queue) -> None:
        key = wide.keys.key
        wide.client.hincrby(key("counters"), "waiting_jobs", 5)
        wide.client.hincrby(key("counters"), "submitted", 7)
        wide.client.hincrby(key("counters"), "waiting_tokens", 9)
        wide.client.hset(key("tenants"), "t7", "3 3 3 3")
        wide.client.hset(key("depth"), mapping={"0:t8": "4 44 4 44 0 0", "0:nobody": "1 1 1 1 0 0"})
        wide.client.zrem(key("heads", "0"), "t400")
        side = QueueSide(wide.client, wide.keys)
        found = {finding.subject for finding in [*side.walk_waiting(), *side.wrong_counts(side.counts())]}

        changed = [name for call in side.repairs_of_counters() for name in wide.run(call)]

        wrong = {"waiting_jobs", "submitted", "waiting_tokens", "lane 0:t8 jobs", "lane 0:nobody jobs", "lane 0:t400"}
        assert {f"0: {name}" for name in wrong} < found
        assert {"waiting_jobs", "submitted", "waiting_tokens", "tenant t7", "0:t8", "0:nobody", "0:t400"} == set(
            changed
        )
        assert [*side.walk_waiting(), *side.wrong_counts(side.counts())] == []
        check(wide)

    def test_when_a_job_comes_before_the_repair_then_sums_are_left_and_lanes_corrected(self, wide: Queue) -> None:
        wide.client.hincrby(wide.keys.key("counters"), "waiting_jobs", 5)
        wide.client.hset(wide.keys.key("depth"), "0:t8", "4 44 4 44 0 0")
        side = QueueSide(wide.client, wide.keys)
        list(side.walk_waiting())
        wide.add("new", "t9")

        changed = [name for call in side.repairs_of_counters() for name in wide.run(call)]

        assert changed == ["0:t8"]
        assert wide.look().waiting_jobs == NUM_LANES + 2 + 5
