"""The lagging device of the tests: it lags, and it shows blocks that are used again too early."""

import pytest

from sluice.engine.batch import Batch, ScheduledRow
from sluice.engine.request import Sampling
from sluice.engine.sequence import Sequence, batch_of
from tests.engine.given import checking_model, lagging


def sequence(number: int, *, blocks: list[int]) -> Sequence:
    return Sequence(
        id=number,
        request_id=f"r{number}",
        choice=0,
        sampling=Sampling(),
        token_ids=[number] * 4,
        num_prompt_tokens=4,
        tables=[blocks],
    )


def prompt(of: Sequence) -> Batch:
    """Its prompt, in the slot of its number."""
    batch = batch_of([(of, 0, 4, True)])
    return Batch((batch.rows[0]._replace(slot=of.id),), admissions=(batch.admissions[0]._replace(slot=of.id),))


def decode(of: Sequence) -> Batch:
    """The step after its prompt."""
    return Batch((ScheduledRow(of.id, of.id, start=4, num_tokens=1, samples=True),))


class TestGivenADeviceThatLags:
    def test_when_a_step_is_launched_then_it_runs_once_the_next_one_is_launched(self) -> None:
        model = checking_model()
        device = lagging(model)
        first = sequence(1, blocks=[0, 1])

        device.launch(prompt(first))
        assert model.num_computed_tokens == 0
        step = device.launch(decode(first))
        assert model.num_computed_tokens == 4
        step.collect()
        assert model.num_computed_tokens == 5

    @pytest.mark.parametrize(("reused", "is_seen"), [(0, True), (2, False)])
    def test_when_a_block_of_a_row_in_flight_is_used_again_then_that_row_shows_it(
        self, reused: int, is_seen: bool
    ) -> None:
        device = lagging(checking_model())
        first = sequence(1, blocks=[0, 1])
        device.launch(prompt(first)).collect()
        step = device.launch(decode(first))

        device.launch(prompt(sequence(2, blocks=[reused])))

        if is_seen:
            with pytest.raises(AssertionError, match="a slot holds something else"):
                step.collect()
        else:
            assert len(step.collect()) == 1
