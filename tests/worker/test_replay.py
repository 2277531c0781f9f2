"""Arrivals in virtual time, and what a replay notes."""

import pytest

from benchmarks.disciplines.arrivals import constant, geometric, poisson
from sluice.engine.config import DISCIPLINE_NAMES, EngineConfig
from sluice.engine.null_model import NullModelConfig
from sluice.engine.scheduling.timing.step_time import StepTime
from sluice.worker.tune.replay import Arrival, Replay, simulate

CACHE = NullModelConfig(num_blocks=256, max_model_len=256)


def config(discipline: str) -> EngineConfig:
    return EngineConfig(discipline=discipline, max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=False)


class TestGivenArrivalsInVirtualTime:
    """Steps of one second, whatever they compute."""

    def replayed(self, *arrivals: Arrival, discipline: str = "continuous") -> Replay:
        return simulate(
            arrivals, StepTime(fixed_s=1.0), config(discipline), NullModelConfig(num_blocks=256, max_model_len=256)
        )

    def test_when_two_come_apart_then_each_has_its_times(self) -> None:
        first = Arrival(at_s=0.0, num_prompt_tokens=5, num_output_tokens=3)
        second = Arrival(at_s=1.5, num_prompt_tokens=5, num_output_tokens=2)

        completed = self.replayed(first, second).completed

        assert [one.token_times_s for one in completed] == [[1.0, 2.0, 3.0], [3.0, 4.0]]
        assert (completed[1].queue_s, completed[1].ttft_s, completed[1].tpot_s, completed[1].e2e_s) == (
            0.5,
            1.5,
            1.0,
            2.5,
        )

    def test_when_none_is_there_then_time_passes_until_the_next_comes(self) -> None:
        late = Arrival(at_s=100.0, num_prompt_tokens=5, num_output_tokens=1)

        assert self.replayed(late).completed[0].token_times_s == [101.0]

    @pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
    def test_when_many_come_then_all_are_served_whatever_the_discipline(self, discipline: str) -> None:
        arrivals = poisson(2.0, 20, constant(10), geometric(4, most=20))

        replayed = self.replayed(*arrivals, discipline=discipline)

        assert [len(one.token_times_s) for one in replayed.completed] == [a.num_output_tokens for a in arrivals]
