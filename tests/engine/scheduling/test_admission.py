"""What a sequence reserves when it joins."""

from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.batch import Batch, ScheduledRow
from sluice.engine.executor import ModelLimits
from sluice.engine.request import SamplingParams
from sluice.engine.scheduling.admission import Auto, Guaranteed, Peak, Watermark
from sluice.engine.scheduling.blocks.manager import blocks_needed
from sluice.engine.scheduling.timing.measured_steps import MeasuredSteps
from sluice.engine.scheduling.timing.step_time import StepTime, work_of
from sluice.engine.sequence import Sequence

LIMITS = ModelLimits(max_model_len=1024, vocab_size=9, eos_token_ids=frozenset(), num_blocks=64, block_size=4)


def sequence_of(num_held_blocks: int, num_lacking_blocks: int) -> Sequence:
    """A sequence that holds full blocks, and will need some more."""
    return Sequence(
        id=0,
        request_id="r",
        choice=0,
        # The last token of an output needs no slot.
        sampling=SamplingParams(max_tokens=num_lacking_blocks * LIMITS.block_size + 1),
        token_ids=[1] * num_held_blocks * LIMITS.block_size,
        num_prompt_tokens=num_held_blocks * LIMITS.block_size,
        block_table=list(range(num_held_blocks)),
    )


def largest_growth(running: list[Sequence]) -> int:
    """Let all grow a token at a time; one that has all its tokens ends before the next one of the others."""
    most = max(one.sampling.max_tokens for one in running)
    totals = [
        sum(blocks_needed(one.num_tokens + age, LIMITS.block_size) for one in running if one.sampling.max_tokens > age)
        for age in range(most)
    ]
    return max(totals) - sum(one.num_held_blocks for one in running)


class TestGivenRunningSequences:
    def test_when_one_ends_early_then_its_blocks_count_for_the_others(self) -> None:
        running = [sequence_of(1, 10), sequence_of(8, 2)]

        # Both grow by 2 blocks and may each begin another; then the second releases more than the first still needs.
        assert Peak(LIMITS).num_spare_blocks(running) == 2 + 2 + 2

    def test_when_another_joins_then_it_counts_with_its_known_tokens(self) -> None:
        running = [sequence_of(1, 6)]

        assert Peak(LIMITS).num_spare_blocks(running, sequence_of(2, 6)) == 6 + 6 + 2

    def test_when_none_runs_then_nothing_is_kept_free(self) -> None:
        # It fills its last block exactly: with the block that the estimate adds, it would never join a cache of 3.
        assert Peak(LIMITS).num_spare_blocks([], sequence_of(1, 2)) == 0

    def test_when_it_is_a_watermark_then_each_has_a_block_to_grow_into(self) -> None:
        assert Watermark(LIMITS).num_spare_blocks([sequence_of(1, 6)] * 3) == 3

    def test_when_all_is_guaranteed_then_a_sequence_holds_its_longest_output(self) -> None:
        mode = Guaranteed(LIMITS)

        assert mode.num_held_tokens(sequence_of(2, 5)) == 7 * LIMITS.block_size
        assert mode.num_spare_blocks([sequence_of(1, 6)] * 3) == 0

    @given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8))
    def test_when_they_grow_one_token_at_a_time_then_the_peak_holds_all(self, lives: list[tuple[int, int]]) -> None:
        running = [sequence_of(held, lacking) for held, lacking in lives]

        most = largest_growth(running)

        assert most <= Peak(LIMITS).num_spare_blocks(running) <= most + len(running)


class TestGivenAModeThatFollowsTheMachine:
    """Twenty sequences run; the peak would keep 120 blocks free, the watermark 20."""

    running = tuple(sequence_of(1, 5) for _ in range(20))

    def num_spare_blocks(self, step_time: StepTime) -> int:
        steps = MeasuredSteps()
        for num_rows in (1, 5, 20) * 8:
            for num_tokens in (1, 30):
                rows = tuple(ScheduledRow(n, n, 10, num_tokens, samples=True) for n in range(num_rows))
                steps.note(Batch(rows), step_time.of(work_of(Batch(rows))))
        return Auto(LIMITS, steps).num_spare_blocks(list(self.running))

    def test_when_tokens_are_dear_then_it_is_the_peak(self) -> None:
        assert self.num_spare_blocks(StepTime(fixed_s=14e-3, token_s=1e-3)) == 120

    def test_when_the_fixed_part_is_dear_then_it_is_the_watermark(self) -> None:
        assert self.num_spare_blocks(StepTime(fixed_s=14e-3, token_s=1e-5)) == 20

    def test_when_nothing_was_measured_then_it_is_the_watermark(self) -> None:
        assert Auto(LIMITS, MeasuredSteps()).num_spare_blocks(list(self.running)) == 20
