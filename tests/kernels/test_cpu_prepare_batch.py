"""The preparation of any step against a loop over its tokens: the CPU's, and that of torch's operators for a GPU."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.kernels.prepare_batch import PADDING, PreparedTokens, StepPlan, prepare_batch
from sluice.kernels.prepare_batch.cpu import prepare_batch_torch
from sluice.kernels.prepare_batch.reference import prepare_batch_reference

NUM_DRAWN = 4
TOKEN = st.one_of(st.integers(0, 99), st.integers(-NUM_DRAWN, -1), st.just(PADDING))
SEQUENCE = st.tuples(st.lists(TOKEN, max_size=9), st.integers(0, 20))
"""Its tokens of the step, and how many came before."""


@pytest.mark.parametrize("prepare", [prepare_batch, prepare_batch_torch])
class TestGivenAnyPlan:
    @settings(max_examples=150, deadline=None)
    @given(
        sequences=st.lists(SEQUENCE, max_size=6),
        num_after=st.integers(0, 3),
        block_size=st.integers(1, 7),
        num_windowed=st.integers(0, 2),
    )
    def test_when_it_is_prepared_then_it_is_as_the_loop_does_it(
        self,
        prepare: Callable[..., PreparedTokens],
        sequences: list[tuple[list[int], int]],
        num_after: int,
        block_size: int,
        num_windowed: int,
    ) -> None:
        lengths = [len(tokens) for tokens, _ in sequences]
        max_blocks = (
            max((before + length for length, (_, before) in zip(lengths, sequences, strict=True)), default=0) + 1
        )
        generator = torch.Generator().manual_seed(0)
        tables = torch.randint(0, 2**31, (1 + num_windowed, len(sequences), max_blocks), generator=generator).int()
        plan = StepPlan(
            token_ids=torch.tensor(
                [t for tokens, _ in sequences for t in tokens] + [-9] * num_after, dtype=torch.int32
            ),
            query_start_locs=torch.tensor([0, *lengths]).cumsum(0).int(),
            context_lens=torch.tensor([len(tokens) + before for tokens, before in sequences], dtype=torch.int32),
            block_tables=tables[0],
            window_tables=tables[1:] if num_windowed else None,
        )
        drawn = torch.tensor([70, -1, 72, 73])

        found = prepare(plan, drawn, block_size=block_size, spare_slot=5)

        expected = prepare_batch_reference(plan, drawn, block_size=block_size, spare_slot=5)
        assert found.input_ids.tolist() == expected.input_ids.tolist()
        assert found.positions.tolist() == expected.positions.tolist()
        assert found.slot_mapping.tolist() == expected.slot_mapping.tolist()
        assert windowed(found) == windowed(expected)


def windowed(prepared: PreparedTokens) -> list[list[int]] | None:
    """The slots of window groups."""
    if prepared.window_slots is None:
        return None
    return cast("list[list[int]]", prepared.window_slots.tolist())
