"""Figures of a simulated discipline."""

import pytest

from benchmarks.disciplines.figures import observe, summarise
from sluice.engine.config import EngineConfig
from sluice.engine.null_model import NullModelConfig
from sluice.engine.scheduling.timing.step_time import StepTime
from sluice.worker.tune.figures import Target
from sluice.worker.tune.replay import Arrival

CACHE = NullModelConfig(num_blocks=256, max_model_len=256)


def config(discipline: str = "continuous") -> EngineConfig:
    return EngineConfig(discipline=discipline, max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=False)


class TestGivenARequestThatEndsEarly:
    def test_when_it_ends_early_then_the_blocks_for_its_maximum_were_held(self) -> None:
        short = Arrival(at_s=0.0, num_prompt_tokens=16, num_output_tokens=2, max_tokens=33)

        replayed = observe([short], StepTime(fixed_s=1.0), config("orca"), CACHE)

        assert len(replayed.completed[0].token_times_s) == 2
        assert [step.num_held_tokens for step in replayed.steps] == [48, 48]
        assert [step.num_filled_tokens for step in replayed.steps] == [16, 17]


class TestGivenAReplay:
    """Two of four slots are taken, in steps of one second; one of the two is late."""

    figures = summarise(
        observe(
            [
                Arrival(at_s=0.0, num_prompt_tokens=4, num_output_tokens=4),
                Arrival(at_s=0.5, num_prompt_tokens=4, num_output_tokens=3),
            ],
            StepTime(fixed_s=1.0),
            config(),
            CACHE,
        ),
        Target(ttft_s=1.2, tpot_s=1.0),
    )

    def test_when_it_is_summed_up_then_rates_count_until_the_last_token(self) -> None:
        assert self.figures.duration_s == 4.0
        assert self.figures.output_tokens_per_s == 7 / 4
        assert (self.figures.goodput_per_s, self.figures.attainment) == (1 / 4, 1 / 2)

    def test_when_it_is_summed_up_then_places_and_slots_are_weighed_by_time(self) -> None:
        assert self.figures.occupancy == (1 + 2 + 2 + 2) / 4 / 4
        assert self.figures.busy == 1.0
        assert self.figures.kv_waste == pytest.approx(1 - (4 + 5 + 6 + 7 + 4 + 5 + 6) / (7 * 16))
