"""What a step costs, and what is fitted to measured steps."""

import pytest

from sluice.engine.batch import Batch, PaddingRow, ScheduledRow
from sluice.engine.scheduling.timing.fitting import fit
from sluice.engine.scheduling.timing.step_time import StepTime, StepWork, work_of


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
