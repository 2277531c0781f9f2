"""The kernels of adapters against their definition, and a row's bits whatever is beside it."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import pytest
import torch

from sluice.kernels.adapters import NO_PLACE, AdapterBank, LowRank, RowPlaces
from sluice.kernels.adapters.kernel import add_adapters_triton
from tests.grids import fast_only
from tests.kernels_triton.devices import DEVICES
from tests.kernels_triton.invariant.matrix_unit import matrix_unit
from tests.oracles.kernel_cases import generator_on, random_tensor, same_bits

NUM_PLACES = 3
CASES = [
    ((48,), 40, 4, 1),
    ((64, 16, 16), 64, 8, 5),
    ((80, 80), 48, 17, 16),
    ((130,), 96, 64, 33),
]
"""Sizes of the stacked matrices, columns of each, the largest rank, and rows."""


def bank_of(part_sizes: tuple[int, ...], in_size: int, rank: int, *, device: str, dtype: torch.dtype) -> AdapterBank:
    """Adapters of different ranks; one lacks its first matrix."""
    generator = generator_on(device)
    like = torch.empty(0, dtype=dtype, device=device)
    bank = AdapterBank(part_sizes, in_size, rank=rank, num_places=NUM_PLACES, like=like)
    for place in range(NUM_PLACES):
        of_place = max(1, rank - place)
        pairs: list[LowRank | None] = [
            LowRank(
                random_tensor(of_place, in_size, dtype=dtype, generator=generator) * 0.2,
                random_tensor(size, of_place, dtype=dtype, generator=generator) * 0.2,
            )
            for size in part_sizes
        ]
        bank.put(place, [None, *pairs[1:]] if place == 1 and len(pairs) > 1 else pairs)
    return bank


def rows_of(places: torch.Tensor) -> RowPlaces:
    return RowPlaces(places.to(torch.int32), tuple(sorted({*places.tolist()} - {NO_PLACE})))


def exact(out: torch.Tensor, x: torch.Tensor, bank: AdapterBank, rows: RowPlaces) -> torch.Tensor:
    """The definition in float64."""
    total = out.double()
    for row, place in enumerate(rows.places.tolist()):
        column = 0
        for index, size in enumerate(bank.part_sizes if place != NO_PLACE else ()):
            down = bank.down[place, index * bank.rank : (index + 1) * bank.rank].double()
            up = bank.up[place, column : column + size].double()
            total[row, column : column + size] += x[row].double() @ down.T @ up.T
            column += size
    return total


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(("part_sizes", "in_size", "rank", "num_tokens"), fast_only(CASES[:2], CASES[2:]))
class TestGivenRowsOfSeveralAdapters:
    def test_when_they_are_added_then_each_row_has_what_its_own_makes_of_it(
        self, device: str, dtype: torch.dtype, part_sizes: tuple[int, ...], in_size: int, rank: int, num_tokens: int
    ) -> None:
        bank = bank_of(part_sizes, in_size, rank, device=device, dtype=dtype)
        generator = generator_on(device)
        x = random_tensor(num_tokens, in_size + 3, dtype=dtype, generator=generator)[:, :in_size]
        before = random_tensor(num_tokens, sum(part_sizes), dtype=dtype, generator=generator)
        rows = rows_of(torch.arange(num_tokens, device=device) % (NUM_PLACES + 1) - 1)
        out = before.clone()

        add_adapters_triton(out, x, bank, rows)

        unit = 2.0**-20 if dtype == torch.float32 else torch.finfo(dtype).eps
        expected = exact(before, x, bank, rows)
        assert float((out.double() - expected).abs().max()) <= 4 * unit * float(expected.abs().max())
        assert same_bits(out[rows.places == NO_PLACE], before[rows.places == NO_PLACE])

    def test_when_other_rows_leave_then_a_row_keeps_its_bits(
        self, device: str, dtype: torch.dtype, part_sizes: tuple[int, ...], in_size: int, rank: int, num_tokens: int
    ) -> None:
        bank = bank_of(part_sizes, in_size, rank, device=device, dtype=dtype)
        generator = generator_on(device)
        x = random_tensor(num_tokens, in_size, dtype=dtype, generator=generator)
        before = random_tensor(num_tokens, sum(part_sizes), dtype=dtype, generator=generator)
        places = torch.arange(num_tokens, device=device) % NUM_PLACES
        together = before.clone()
        with matrix_unit():
            add_adapters_triton(together, x, bank, rows_of(places))

            for row in {0, num_tokens // 2, num_tokens - 1}:
                alone = before[row : row + 1].clone()
                add_adapters_triton(alone, x[row : row + 1], bank, rows_of(places[row : row + 1]))
                assert same_bits(alone, together[row : row + 1])
