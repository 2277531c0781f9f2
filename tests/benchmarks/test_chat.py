"""The chat benchmark, over a model whose step takes a millisecond a token: what is compared is known."""

import pytest

from benchmarks.engine.chat import Chats, Shape, Turn, table_of
from sluice.engine.null_model import NullModelConfig
from sluice.engine.scheduling.timing.step_time import StepTime
from sluice.engine.simulation.executor import SimulatedExecutor, VirtualClock


@pytest.fixture
def turns() -> list[Turn]:
    """Three turns of 96 and 64 tokens."""
    clock = VirtualClock()
    executor = SimulatedExecutor(StepTime(fixed_s=0.0, token_s=1e-3), clock, NullModelConfig())
    return Chats(executor, Shape(num_turns=3), clock.now_s).converse()


class TestGivenAConversation:
    def test_when_a_turn_follows_then_it_says_all_that_was_said(self, turns: list[Turn]) -> None:
        assert [turn.num_prompt_tokens for turn in turns] == [96, 256, 416]

    def test_when_a_turn_follows_then_only_new_tokens_and_the_last_one_are_computed(self, turns: list[Turn]) -> None:
        assert [turn.num_computed_tokens for turn in turns] == [96, 1 + 96, 1 + 96]
        assert [turn.ttft_s for turn in turns] == pytest.approx([0.096, 0.097, 0.097])

    def test_when_it_is_compared_then_fresh_prompts_are_found_nowhere(self, turns: list[Turn]) -> None:
        assert [turn.fresh_s for turn in turns] == pytest.approx([0.096] * 3)
        assert [turn.as_long_s for turn in turns] == pytest.approx([turn.ttft_s for turn in turns])

    def test_when_it_is_printed_then_the_worst_later_turn_is_named(self, turns: list[Turn]) -> None:
        lines = table_of([turns] * 3)

        assert len(lines) == 1 + len(turns) + 1
        assert lines[-1] == "worst later turn: 1.01 (limit 1.3)"
