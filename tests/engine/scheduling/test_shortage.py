"""Steps for which there is no memory: no request is blamed, steps become smaller, and all continue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.batch import Batch
from sluice.engine.config import DISCIPLINE_NAMES
from sluice.engine.errors import EngineBroken, OutOfMemory
from sluice.engine.execution.isolation import MAX_SHORTAGES
from sluice.engine.null_model import NullModelConfig
from sluice.engine.request import FinishReason
from sluice.engine.scheduling.step_budget import REST, StepBudget
from tests.engine.given import Checked, CheckingModel, engine_over, lagging, request, run, undisturbed

SIZES = [3, 40, 11, 1, 25, 17, 60, 8]
NAMES = [f"r{n}" for n in range(len(SIZES))]


class CrampedModel(CheckingModel):
    """Has memory for steps of so many tokens, while that is little."""

    def __init__(self, config: NullModelConfig, *, room: int) -> None:
        super().__init__(config)
        self.room = room
        self.asked: list[int] = []

    def launch(self, batch: Batch) -> Checked:
        self.asked.append(batch.num_tokens)
        if batch.num_tokens > self.room:
            raise OutOfMemory(f"no memory for {batch.num_tokens} tokens")
        return super().launch(batch)


def cramped(room: int) -> CrampedModel:
    return CrampedModel(NullModelConfig(num_blocks=128, block_size=4), room=room)


class TestGivenADeviceWithRoomForSmallStepsOnly:
    @pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
    @pytest.mark.parametrize("room", [1, 2, 5, 20])
    def test_when_requests_run_then_each_gets_its_tokens_and_none_is_blamed(self, room: int, discipline: str) -> None:
        model = cramped(room)
        engine = engine_over(model, discipline=discipline, batch_window_s=0.0)
        asked = [request(name, b"p" * size, max_tokens=9) for name, size in zip(NAMES, SIZES, strict=True)]
        engine.add(asked)

        transcripts = run(engine)

        for one in asked:
            expected = undisturbed(one)[one.id, 0]
            assert transcripts[one.id, 0].token_ids == expected.token_ids
            assert transcripts[one.id, 0].finish == expected.finish

    @pytest.mark.parametrize("room", [1, 3, 20])
    def test_when_steps_are_launched_ahead_then_each_still_gets_its_tokens(self, room: int) -> None:
        engine = engine_over(lagging(cramped(room)))
        asked = [request(name, b"p" * size, max_tokens=9) for name, size in zip(NAMES, SIZES, strict=True)]
        engine.add(asked)

        transcripts = run(engine)

        for one in asked:
            assert transcripts[one.id, 0].token_ids == undisturbed(one)[one.id, 0].token_ids

    def test_when_a_step_is_too_large_then_the_last_is_preempted_and_the_first_continues(self) -> None:
        model = cramped(1000)
        engine = engine_over(model, max_step_retries=0)
        engine.add([request(f"r{n}", b"prompt", max_tokens=20) for n in range(8)])
        engine.advance()
        model.room = 5

        lost = engine.advance()
        gained = engine.advance()

        assert lost == []
        assert [delta.request_id for delta in gained] == ["r0", "r1", "r2", "r3"], "half of the eight that did not fit"
        assert model.asked == [48, 8, 4]
        assert engine.stats.num_preemptions == 4
        assert engine.stats.last_failure == "OutOfMemory: no memory for 8 tokens"

    def test_when_there_is_room_again_then_steps_grow_back(self) -> None:
        model = cramped(4)
        engine = engine_over(model, max_num_batched_tokens=8, max_step_retries=0)
        engine.add([request(f"r{n}", b"p" * 4, max_tokens=REST + 100) for n in range(8)])
        while not any(num_tokens == 4 for num_tokens in model.asked):
            engine.advance()
        model.room = 8

        run(engine)

        assert 8 in model.asked[REST:]

    def test_when_not_even_one_token_fits_then_a_restart_is_asked_for_and_no_job_fails(self) -> None:
        model = cramped(0)
        engine = engine_over(model)
        engine.add([request(f"r{n}", b"prompt", max_tokens=9) for n in range(3)])

        with pytest.raises(EngineBroken, match="no memory for 1 tokens"):
            run(engine, max_steps=MAX_SHORTAGES)

        assert len(model.asked) <= 3 * MAX_SHORTAGES


class TooLarge(CheckingModel):
    """Never has memory for one request, whatever else is in the step."""

    def __init__(self, config: NullModelConfig) -> None:
        super().__init__(config)
        self.large: set[int] = set()

    def launch(self, batch: Batch) -> Checked:
        self.large |= {one.sequence_id for one in batch.admissions if one.request_id == "large"}
        if any(row.sequence_id in self.large for row in batch.rows):
            raise OutOfMemory("it is too large")
        return super().launch(batch)


class TestGivenARequestThatAlwaysLacksMemory:
    @pytest.mark.parametrize("at", [0, 2, 4])
    def test_when_it_runs_among_others_then_it_alone_fails_for_lack_of_memory(self, at: int) -> None:
        engine = engine_over(TooLarge(NullModelConfig(num_blocks=64, block_size=4)))
        names = [f"r{n}" for n in range(4)]
        names.insert(at, "large")
        engine.add([request(name, b"prompt", max_tokens=6) for name in names])

        transcripts = run(engine)

        finish = transcripts["large", 0].finish
        assert finish is not None
        assert (finish.reason, finish.failure) == (FinishReason.ERROR, "out_of_memory")
        for name in set(names) - {"large"}:
            expected = undisturbed(request(name, b"prompt", max_tokens=6))[name, 0]
            assert transcripts[name, 0].token_ids == expected.token_ids


class PoisonedAndCramped(CrampedModel):
    """Fails every step with one request, and has memory for small steps only once it has failed."""

    def __init__(self, config: NullModelConfig, *, room: int) -> None:
        super().__init__(config, room=10_000)
        self._later_room = room
        self._poison: set[int] = set()

    def launch(self, batch: Batch) -> Checked:
        self._poison |= {one.sequence_id for one in batch.admissions if one.request_id == "poison"}
        if any(row.sequence_id in self._poison for row in batch.rows):
            self.room = self._later_room
            raise RuntimeError("it is poison")
        return super().launch(batch)


class TestGivenAStepThatIsDividedWhileMemoryIsShort:
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("room", [1, 4, 30])
    @pytest.mark.parametrize("at", [0, 2, 4])
    def test_when_a_part_lacks_memory_then_only_the_poison_is_blamed(self, at: int, room: int, lag: int) -> None:
        model = PoisonedAndCramped(NullModelConfig(num_blocks=128, block_size=4), room=room)
        engine = engine_over(lagging(model) if lag else model)
        asked = [request(f"r{n}", b"p" * size, max_tokens=6) for n, size in enumerate((50, 3, 40, 11))]
        asked.insert(at, request("poison", b"p" * 5, max_tokens=6))
        engine.add(asked)

        transcripts = run(engine)

        finish = transcripts["poison", 0].finish
        assert finish is not None
        assert (finish.reason, finish.failure) == (FinishReason.ERROR, "engine_error")
        for one in asked:
            if one.id != "poison":
                assert transcripts[one.id, 0].token_ids == undisturbed(one)[one.id, 0].token_ids
                assert transcripts[one.id, 0].finish == undisturbed(one)[one.id, 0].finish


class TestGivenABudget:
    @given(most=st.integers(1, 5000), history=st.lists(st.one_of(st.integers(1, 5000), st.none()), max_size=60))
    def test_when_steps_succeed_and_fail_then_the_budget_stays_in_its_bounds(
        self, most: int, history: list[int | None]
    ) -> None:
        budget = StepBudget(most)

        for failed in history:
            if failed is None:
                budget.note_success()
            else:
                budget.shrink(failed)
                assert budget.tokens < failed or failed == 1
            assert 1 <= budget.tokens <= most

        for _ in range(REST * most.bit_length()):
            budget.note_success()
        assert budget.tokens == most
