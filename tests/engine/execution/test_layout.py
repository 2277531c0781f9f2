"""How a step is laid out where the host does not know all of its tokens yet; the rest is for the oracles."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.batch import Batch, PaddingRow
from sluice.engine.execution.transfers import Staging
from sluice.engine.request import Sampling
from sluice.engine.sequence import Sequence
from sluice.kernels.decoder_step import StepInputs
from tests.engine.layouts import Part, StepLayout

BLOCK_SIZE = 4
DRAWN_IDS = torch.tensor([900, 901, -1, 903, 904, 905])
"""Of the step before: row 2 failed."""


def sequence(number: int, num_tokens: int) -> Sequence:
    return Sequence(
        id=number,
        request_id=f"r{number}",
        choice=0,
        sampling=Sampling(),
        token_ids=[10 * number + i for i in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        tables=[[number * 4 + i for i in range(4)]],
    )


def layout_of(*, num_blocks: int = 32) -> StepLayout:
    return StepLayout(max_num_seqs=4, max_blocks_per_seq=4, num_blocks=num_blocks, block_size=BLOCK_SIZE)


def lay_out(*parts: Part, drawn_rows: dict[int, int]) -> StepInputs:
    return layout_of().lay_out(parts, drawn_rows, DRAWN_IDS)


def fed(number: int, num_known: int) -> Part:
    """A row whose one token is the one after those that are known."""
    return sequence(number, num_known), num_known, 1, True


class TestGivenTokensThatTheHostDoesNotKnow:
    def test_when_they_are_laid_out_then_each_comes_from_its_own_row_of_the_step_before(self) -> None:
        prompt = sequence(1, 6), 2, 3, False
        decode = sequence(2, 5), 4, 1, True

        tensors = lay_out(fed(3, 7), prompt, fed(0, 3), decode, drawn_rows={0: 5, 2: 1, 3: 0, 9: 2})

        assert tensors.input_ids.tolist() == [900, 12, 13, 14, 905, 24]

    def test_when_its_row_failed_then_it_is_something_that_the_model_can_read(self) -> None:
        assert lay_out(fed(3, 7), drawn_rows={3: 2}).input_ids.tolist() == [0]

    def test_when_they_are_laid_out_then_their_place_is_that_of_any_token(self) -> None:
        tensors = lay_out(fed(3, 7), fed(0, 8), drawn_rows={0: 0, 3: 1})

        assert tensors.positions.tolist() == [7, 8]
        assert tensors.slot_mapping.tolist() == [(3 * 4 + 1) * BLOCK_SIZE + 3, 2 * BLOCK_SIZE]
        assert tensors.context_lens.tolist() == [8, 9]
        assert tensors.logit_rows.tolist() == [0, 1]

    def test_when_the_host_knows_all_then_nothing_is_fed(self) -> None:
        tensors = lay_out((sequence(1, 5), 4, 1, True), drawn_rows={1: 0})

        assert tensors.input_ids.tolist() == [14]

    @pytest.mark.parametrize("drawn_rows", [{0: 0}, {}])
    def test_when_the_step_before_did_not_draw_one_then_it_is_an_error(self, drawn_rows: dict[int, int]) -> None:
        with pytest.raises(KeyError):
            lay_out(fed(3, 7), drawn_rows=drawn_rows)


class TestGivenStepsOfDecodesAlone:
    """The host lays them out over the last step's, in their own order."""

    @given(
        steps=st.lists(
            st.lists(
                st.tuples(st.integers(0, 7), st.integers(1, 16)), min_size=1, max_size=4, unique_by=lambda x: x[0]
            ),
            min_size=1,
            max_size=6,
        )
    )
    def test_when_they_come_and_go_then_each_step_is_laid_out_as_any_other_would_be(
        self, steps: list[list[tuple[int, int]]]
    ) -> None:
        own, general = layout_of(), layout_of()
        for step in steps:
            parts = [(sequence(n, length), length - 1, 1, True) for n, length in step]

            actual = own.lay_out(parts)

            expected = general.lay_out(parts, {-1: 0}, DRAWN_IDS)
            for name in StepInputs._fields:
                one, other = getattr(actual, name), getattr(expected, name)
                if name == "block_tables":
                    # The general layout has only the columns that the step uses.
                    one = one[:, : other.shape[1]]
                if isinstance(other, torch.Tensor):
                    assert (one.dtype, one.tolist()) == (other.dtype, other.tolist()), name
                else:
                    assert one == other, name


class TestGivenPadding:
    def test_when_padding_varies_then_a_row_reads_the_same_blocks(self) -> None:
        layout = layout_of(num_blocks=7)

        for num_rows in (1, 5, 2, 6):
            tensors = layout.lay_out_batch(Batch((), padding=(PaddingRow(1, 1),) * num_rows))
            expected = [[row * 4 % 7] for row in range(num_rows)]
            assert tensors.block_tables.tolist() == expected

    def test_when_steps_are_padded_one_after_the_other_then_the_tables_are_made_once(self) -> None:
        tables_of = layout_of(num_blocks=7).layout._tables_of_padding  # pyright: ignore[reportPrivateUsage]

        assert np.shares_memory(tables_of(1), tables_of(5))


class TestGivenArraysOfManySizes:
    def test_when_they_go_together_then_each_arrives_whole_and_aligned(self) -> None:
        arrays = [
            np.arange(size, dtype=np.int32).reshape(shape) for size, shape in ((5, 5), (0, 0), (6, (2, 3)), (1, 1))
        ]

        moved = Staging(torch.device("cpu")).send(arrays)

        assert [tensor.tolist() for tensor in moved] == [array.tolist() for array in arrays]
        assert [(tensor.data_ptr() - moved[0].data_ptr()) % 16 for tensor in moved] == [0] * 4
