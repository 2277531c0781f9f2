"""Ids, positions and slots of a step, by the kernel and by the CPU's arithmetic, against a loop."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sluice.kernels.prepare_batch import PADDING, PreparedTokens, StepPlan, prepare_batch
from sluice.kernels.prepare_batch.cpu import prepare_batch_cpu
from sluice.kernels.prepare_batch.kernel import prepare_batch_triton
from sluice.kernels.prepare_batch.reference import prepare_batch_reference
from tests.grids import cross_section
from tests.kernels_triton.devices import DEVICES
from tests.oracles.kernel_cases import NO_BLOCK

Prepare = Callable[..., PreparedTokens]
PATHS = [
    pytest.param("cpu", prepare_batch_triton, id="cpu-triton"),
    pytest.param("cpu", prepare_batch_cpu, id="cpu-arithmetic"),
    pytest.param("cuda", prepare_batch_triton, id="cuda", marks=DEVICES[2].marks),
]


def plan_of(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_size: int,
    device: str,
    num_after: int = 0,
    num_windowed: int = 0,
) -> StepPlan:
    """A plan of random ids, every fourth fed by a drawn row; table entries that hold nothing must not be read."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    num_tokens = int(starts[-1])
    token_ids = torch.randint(0, 1000, (num_tokens + num_after,), generator=generator).int()
    token_ids[::4] = -1 - torch.arange(len(token_ids[::4])).int()
    # What lies after the last sequence is stale.
    token_ids[num_tokens:] = -77
    longest = max(context_lens, default=0)
    wide = torch.full((1 + num_windowed, len(context_lens), longest // block_size + 5), NO_BLOCK, dtype=torch.int32)
    for table in wide:
        for s, context_len in enumerate(context_lens):
            used = -(-context_len // block_size)
            table[s, :used] = torch.randperm(5000, generator=generator)[:used].int()
    tables = wide.to(device)[..., : longest // block_size + 2]
    lens = torch.tensor(context_lens, dtype=torch.int32)
    return StepPlan(
        token_ids=token_ids.to(device),
        query_start_locs=starts.to(device),
        context_lens=lens.to(device),
        block_tables=tables[0],
        window_tables=tables[1:] if num_windowed else None,
    )


def as_lists(prepared: PreparedTokens) -> list[list[int]]:
    windowed = [] if prepared.window_slots is None else prepared.window_slots.tolist()
    return [prepared.input_ids.tolist(), prepared.positions.tolist(), prepared.slot_mapping.tolist(), *windowed]


def drawn(num_rows: int, device: str) -> Tensor:
    """Ids of the step before; row 1 failed."""
    ids = torch.arange(5000, 5000 + max(num_rows, 2), device=device)
    ids[1] = -1
    return ids


@pytest.mark.parametrize(("device", "prepare"), PATHS)
class TestGivenAPlan:
    @pytest.mark.parametrize(
        ("query_lens", "context_lens", "num_after", "block_size", "num_windowed"),
        cross_section(
            [
                ([1], [1], 0),
                ([1, 1, 1], [16, 17, 300], 0),
                ([15, 1, 33, 0, 2], [15, 64, 65, 9, 40], 3),
                ([256, 257, 1], [256, 900, 5], 0),
                ([], [], 4),
                ([], [], 0),
            ],
            [(1, 2), (8, 0), (16, 6), (32, 1)],
        ),
    )
    def test_when_it_is_carried_out_then_every_token_is_that_of_the_loop(
        self,
        device: str,
        prepare: Prepare,
        query_lens: list[int],
        context_lens: list[int],
        num_after: int,
        block_size: int,
        num_windowed: int,
    ) -> None:
        plan = plan_of(query_lens, context_lens, block_size, device, num_after, num_windowed)
        ids = drawn(sum(query_lens) // 4 + 1, device)

        found = prepare(plan, ids, block_size=block_size, spare_slot=9999)

        expected = prepare_batch_reference(plan, ids, block_size=block_size, spare_slot=9999)
        assert as_lists(found) == as_lists(expected)
        assert found.slot_mapping.dtype == found.positions.dtype == found.input_ids.dtype == torch.int64

    def test_when_rows_are_padding_then_they_write_to_the_spare_slot_alone(self, device: str, prepare: Prepare) -> None:
        plan = plan_of([1, 3], [20, 6], 4, device, num_windowed=1)
        assert plan.window_tables is not None
        plan.token_ids[1:] = PADDING
        plan.block_tables[1] = plan.window_tables[:, 1] = NO_BLOCK

        found = prepare(plan, drawn(1, device), block_size=4, spare_slot=123)

        assert found.slot_mapping[1:].tolist() == [123] * 3
        assert found.window_slots is not None
        assert found.window_slots[:, 1:].tolist() == [[123] * 3]
        assert found.input_ids[1:].tolist() == [0] * 3
        assert found.positions.tolist() == [19, 3, 4, 5]
        assert found.slot_mapping[0] >= 0

    def test_when_the_host_knows_every_id_then_no_drawn_ids_are_needed(self, device: str, prepare: Prepare) -> None:
        plan = plan_of([2, 1], [2, 9], 4, device)
        plan = replace(plan, token_ids=torch.tensor([7, 0, 9], dtype=torch.int32, device=device))

        assert prepare(plan, None, block_size=4, spare_slot=0).input_ids.tolist() == [7, 0, 9]

    @pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
    def test_when_the_number_of_tokens_is_odd_then_rows_stay_aligned(
        self, device: str, prepare: Prepare, num_tokens: int
    ) -> None:
        plan = plan_of([num_tokens], [9], 4, device, num_windowed=2)

        found = prepare(plan, drawn(2, device), block_size=4, spare_slot=0)

        assert found.window_slots is not None
        rows = (found.input_ids, found.positions, found.slot_mapping, *found.window_slots)
        # The arithmetic of the CPU is not read by Triton.
        is_kernel = prepare is prepare_batch_triton
        assert [row.data_ptr() % 16 for row in (rows if is_kernel else rows[:3])] == [0] * (5 if is_kernel else 3)
        assert all(row.is_contiguous() for row in rows)

    def test_when_a_block_lies_beyond_two_to_the_31_slots_then_its_slot_does_not_wrap(
        self, device: str, prepare: Prepare
    ) -> None:
        plan = plan_of([1], [1], 16, device)
        plan.block_tables[0, 0] = 2**31 - 1

        found = prepare(plan, drawn(1, device), block_size=16, spare_slot=0)

        assert found.slot_mapping.tolist() == [(2**31 - 1) * 16]


class TestGivenAPlanThatIsWrong:
    def test_when_its_integers_are_wide_then_it_says_so(self) -> None:
        plan = plan_of([1], [1], 4, "cpu")

        with pytest.raises(ValueError, match="must be int32"):
            prepare_batch(replace(plan, context_lens=plan.context_lens.long()), None, block_size=4, spare_slot=0)

    def test_when_tables_of_window_groups_have_other_rows_then_it_says_so(self) -> None:
        plan = plan_of([1], [1], 4, "cpu", num_windowed=1)
        assert plan.window_tables is not None

        with pytest.raises(ValueError, match=r"window_tables must be \[W, S, max_blocks\]"):
            prepare_batch(
                replace(plan, window_tables=plan.window_tables.repeat(1, 2, 1)), None, block_size=4, spare_slot=0
            )
