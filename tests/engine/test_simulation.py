"""Arrivals in virtual time: what a step costs, what a replay notes, and what is fitted to it."""

import pytest

from sluice.engine.batch import Batch, PaddingRow, ScheduledRow
from sluice.engine.config import DISCIPLINE_NAMES, EngineConfig
from sluice.engine.null_model import NullModelConfig
from sluice.engine.scheduling.timing.fitting import fit
from sluice.engine.scheduling.timing.step_time import StepTime, StepWork, work_of
from sluice.engine.simulation.arrivals import Arrival, constant, geometric, poisson
from sluice.engine.simulation.executor import SimulatedExecutor, VirtualClock
from sluice.engine.simulation.figures import Target, summarise
from sluice.engine.simulation.replay import Replay, replay, simulate

CACHE = NullModelConfig(num_blocks=256, max_model_len=256)


def config(discipline: str = "continuous") -> EngineConfig:
    return EngineConfig(discipline=discipline, max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=False)


def row(start: int, num_tokens: int, *, samples: bool = True) -> ScheduledRow:
    return ScheduledRow(slot=0, sequence_id=0, start=start, num_tokens=num_tokens, samples=samples)


class TestGivenAStep:
    def test_when_its_work_is_counted_then_padding_counts_as_well(self) -> None:
        batch = Batch((row(10, 1), row(4, 3, samples=False)), padding=(PaddingRow(2, 9), PaddingRow(1, 11)))

        assert work_of(batch) == StepWork(
            num_tokens=1 + 3 + 2 + 1,
            num_kv_tokens=11 + 7 + 9 + 11,
            num_pairs=(5 + 6 + 7) + (8 + 9),
            num_rows=1 + 1,
        )


class TestGivenStepsThatWereMeasured:
    true = StepTime(fixed_s=4e-3, token_s=3e-5, kv_token_s=2e-7, pair_s=1e-8, row_s=2e-5)
    steps = tuple(
        StepWork(num_tokens=rows + prompt, num_kv_tokens=rows * context, num_pairs=prompt * prompt // 2, num_rows=rows)
        for rows in (1, 4, 16)
        for context in (50, 500)
        for prompt in (0, 32, 200)
    )

    def test_when_a_step_time_is_fitted_then_its_terms_are_found_despite_outliers(self) -> None:
        measured = [(work, self.true.of(work)) for work in self.steps]
        measured[7] = (measured[7][0], measured[7][1] * 3)

        found = fit(measured)

        assert found.step_time.fixed_s == pytest.approx(self.true.fixed_s, rel=0.05)
        assert found.step_time.token_s == pytest.approx(self.true.token_s, rel=0.05)
        assert found.median_error < 0.02

    def test_when_a_term_would_be_negative_then_it_is_left_out(self) -> None:
        measured = [(work, 5e-3 + 1e-5 * work.num_tokens - 1e-6 * work.num_rows) for work in self.steps]

        found = fit(measured).step_time

        assert min(found.fixed_s, found.token_s, found.kv_token_s, found.pair_s, found.row_s) >= 0
        assert found.fixed_s == pytest.approx(5e-3, rel=0.05)

    def test_when_there_are_too_few_then_that_is_said(self) -> None:
        with pytest.raises(ValueError, match="10 steps or more, got 3"):
            fit([(self.steps[0], 1.0)] * 3)


class TestGivenArrivalsInVirtualTime:
    """Steps of one second, whatever they compute."""

    def replayed(self, *arrivals: Arrival, discipline: str = "continuous") -> Replay:
        return simulate(arrivals, StepTime(fixed_s=1.0), config(discipline), CACHE)

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

        replayed = self.replayed(late)

        assert replayed.completed[0].token_times_s == [101.0]
        assert [step.begin_s for step in replayed.steps] == [100.0]

    def test_when_it_ends_early_then_the_blocks_for_its_maximum_were_held(self) -> None:
        short = Arrival(at_s=0.0, num_prompt_tokens=16, num_output_tokens=2, max_tokens=33)

        replayed = self.replayed(short, discipline="orca")

        assert len(replayed.completed[0].token_times_s) == 2
        assert [step.num_held_tokens for step in replayed.steps] == [48, 48]
        assert [step.num_filled_tokens for step in replayed.steps] == [16, 17]

    @pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
    def test_when_many_come_then_all_are_served_whatever_the_discipline(self, discipline: str) -> None:
        arrivals = poisson(2.0, 20, constant(10), geometric(4, most=20))

        replayed = self.replayed(*arrivals, discipline=discipline)

        assert [len(one.token_times_s) for one in replayed.completed] == [a.num_output_tokens for a in arrivals]

    def test_when_prompts_were_computed_elsewhere_then_they_take_no_time_here(self) -> None:
        clock = VirtualClock()
        executor = SimulatedExecutor(StepTime(fixed_s=1.0, token_s=1.0), clock, CACHE, has_prompts=True)
        arrival = Arrival(at_s=0.0, num_prompt_tokens=50, num_output_tokens=2)

        replayed = replay([arrival], executor, config(), clock)

        assert replayed.completed[0].token_times_s == [1.0, 3.0]


class TestGivenAReplay:
    """Two of four slots are taken, in steps of one second; one of the two is late."""

    figures = summarise(
        simulate(
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
