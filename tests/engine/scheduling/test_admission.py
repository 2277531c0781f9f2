"""What a sequence reserves when it joins."""

import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.executor import ModelLimits
from sluice.engine.request import Sampling
from sluice.engine.scheduling.admission import AdmissionMode, Watermark
from sluice.engine.sequence import Sequence

LIMITS = ModelLimits(max_model_len=1024, vocab_size=9, eos_token_ids=frozenset(), num_blocks=64, block_size=4)


def sequence_of(num_held_blocks: int, num_lacking_blocks: int) -> Sequence:
    """A sequence that holds full blocks, and will need some more."""
    return Sequence(
        id=0,
        request_id="r",
        choice=0,
        # The last token of an output needs no slot.
        sampling=Sampling(max_tokens=num_lacking_blocks * LIMITS.block_size + 1),
        token_ids=[1] * num_held_blocks * LIMITS.block_size,
        num_prompt_tokens=num_held_blocks * LIMITS.block_size,
        tables=[list(range(num_held_blocks))],
    )


class TestGivenRunningSequences:
    def test_when_it_is_a_watermark_then_each_has_a_block_to_grow_into(self) -> None:
        assert Watermark(LIMITS).num_spare_blocks([sequence_of(1, 6)] * 3) == 3

    def test_when_all_is_guaranteed_then_a_sequence_holds_its_longest_output(self) -> None:
        mode = AdmissionMode(LIMITS)

        assert mode.num_held_tokens(sequence_of(2, 5)) == 7 * LIMITS.block_size
        assert mode.num_spare_blocks([sequence_of(1, 6)] * 3) == 0


class TestGivenAModeThatLeft:
    @pytest.mark.parametrize("name", ["peak", "auto"])
    def test_when_it_is_configured_then_the_sentence_names_the_modes_there_are(self, name: str) -> None:
        problems = EngineConfig(admission=name).problems()

        assert problems == [f"admission must be one of watermark, guaranteed, got '{name}'"]
