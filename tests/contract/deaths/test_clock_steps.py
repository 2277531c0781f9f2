"""The server's clock steps, or another server with another clock takes over: heartbeats expire as before."""

import pytest

from sluice.producer.contract.limits import BEAT_EVERY_S, HEARTBEAT_LIFETIME_S
from sluice.producer.contract.wire import JobId
from tests.contract.driving import Queue, Worker, check, short

BEAT_MS, LIFE_MS = int(BEAT_EVERY_S * 1000), int(HEARTBEAT_LIFETIME_S * 1000)
STEPS_MS = (3_600_000, 1500, -1500, -1_800_000)


class TestGivenAClockThatSteps:
    """A and B beat every second; A holds a job."""

    @pytest.fixture
    def pair(self, queue: Queue) -> tuple[Worker, Worker]:
        first, second = queue.worker("A"), queue.worker("B")
        first.beat()
        second.beat()
        queue.add("one")
        first.take()
        first.beat(JobId("0.t.one"))
        return first, second

    @pytest.mark.parametrize("step_ms", STEPS_MS)
    def test_when_both_live_then_neither_is_taken_for_dead(
        self, queue: Queue, pair: tuple[Worker, Worker], step_ms: int
    ) -> None:
        first, second = pair
        for at in range(10):
            queue.step_clock(step_ms if at == 5 else BEAT_MS)

            assert second.pull().jobs == ()
            assert not first.beat(JobId("0.t.one")).was_dead
            assert not second.beat().was_dead
        assert len(queue.look().workers) == 2
        check(queue)

    @pytest.mark.parametrize("step_ms", STEPS_MS)
    @pytest.mark.parametrize("step_at", [0, 2])
    def test_when_one_died_then_its_job_moves_within_a_life_and_two_beats(
        self, queue: Queue, pair: tuple[Worker, Worker], step_ms: int, step_at: int
    ) -> None:
        second, waited_ms = pair[1], 0
        moved: list[str] = []
        while not moved:
            if waited_ms == step_at * BEAT_MS:
                queue.step_clock(step_ms)
            queue.step_clock(BEAT_MS)
            waited_ms += BEAT_MS
            second.beat()
            moved = short(second.pull().jobs)
            assert waited_ms <= LIFE_MS + 2 * BEAT_MS

        assert moved == ["one"]
        assert waited_ms >= LIFE_MS - 2 * BEAT_MS
        check(queue)

    def test_when_only_pulls_come_then_the_clock_of_heartbeats_stays(
        self, queue: Queue, pair: tuple[Worker, Worker]
    ) -> None:
        for _ in range(10):
            queue.step_clock(50)
            assert pair[1].pull().jobs == ()
        queue.step_clock(3_600_000)
        for _ in range(10):
            queue.step_clock(50)
            assert pair[1].pull().jobs == ()

        assert not pair[0].beat(JobId("0.t.one")).was_dead
