"""What low-rank adapters add to a product: `x @ down.T @ up.T`, for each row by its own adapter.

They are those of LoRA (arXiv 2106.09685). Several are in a step at once (Punica, arXiv 2310.18547; S-LoRA, arXiv
2311.03285). A product may be of several matrices stacked, such as query, key and value, each with a pair of its own.
Rows without an adapter are not changed. Here the product is complete before; the native products of a CPU add within
their epilogue (`native.py`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows

__all__ = ["NO_PLACE", "AdapterBank", "LowRank", "RowPlaces", "add_adapters"]

NO_PLACE = -1
"""Of a row without an adapter."""

BLOCK_COLUMNS = 64
"""Columns of a program of the kernel, all of one matrix."""


class LowRank(NamedTuple):
    """The pair of one adapter for one matrix `[N, K]`."""

    down: Tensor
    """`[R, K]`."""

    up: Tensor
    """`[N, R]`, scaled."""


class RowPlaces(NamedTuple):
    """The adapters of T rows."""

    places: Tensor
    """`[T]` int32: the place of each row's adapter, or `NO_PLACE`."""

    used: tuple[int, ...]
    """Those that occur."""


class AdapterBank:
    """The pairs of all loaded adapters for one product, by place. Changes when an adapter is put in a place."""

    def __init__(self, part_sizes: Sequence[int], in_size: int, *, rank: int, num_places: int, like: Tensor) -> None:
        """Allocate places for adapters whose ranks are at most `rank`.

        Args:
            part_sizes: rows of each of the matrices that the product stacks.
            in_size: K, the columns of each.
            rank: the largest rank.
            num_places: adapters that can be there at once.
            like: has the dtype and the device of the product's rows.
        """
        self.rank = rank
        self.part_sizes = tuple(part_sizes)
        self.down = like.new_zeros(num_places, len(part_sizes) * rank, in_size)
        """`[P, parts * rank, K]`."""

        self.up = like.new_zeros(num_places, sum(part_sizes), rank)
        """`[P, N, rank]`."""

        self.blocks = torch.tensor(_blocks(part_sizes, rank), dtype=torch.int32, device=like.device)
        """`[B, 3]` int32: first column, end, and the first number between `down` and `up` that they read."""

    def put(self, place: int, pairs: Sequence[LowRank | None]) -> None:
        """Replace what is in a place by these pairs, one for each matrix."""
        self.down[place].zero_()
        self.up[place].zero_()
        column = 0
        for index, (size, pair) in enumerate(zip(self.part_sizes, pairs, strict=True)):
            if pair is not None:
                num_ranks, first = pair.down.shape[0], index * self.rank
                self.down[place, first : first + num_ranks] = pair.down
                self.up[place, column : column + size, :num_ranks] = pair.up
            column += size


def add_adapters(out: Tensor, x: Tensor, bank: AdapterBank, rows: RowPlaces) -> None:
    """Add to each row of `out` what its adapter makes of that row of `x`. Float32 inside, rounded once.

    A row's result depends neither on the other rows nor on their adapters.

    Args:
        out: `[T, N]`, float32, float16 or bfloat16, the product without adapters; changed in place.
        x: `[T, K]`, dtype of `out`; rows may be strided.
        bank: the adapters, in the same dtype.
        rows: the adapter of each row.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    num_columns, in_size = bank.up.shape[1], bank.down.shape[2]
    check(out.shape == (x.shape[0], num_columns), "out must be [{}, {}], got {}", x.shape[0], num_columns, out.shape)
    check(x.shape[1:] == (in_size,), "x must be [T, {}], got {}", in_size, x.shape)
    check(x.dtype == out.dtype == bank.up.dtype, "x, out and adapters must have one dtype")
    check(rows.places.shape == x.shape[:1] and rows.places.dtype == torch.int32, "places must be [T] int32")
    check_rows("x", x)
    check_rows("out", out)
    if not rows.used:
        return
    if path_of("adapters", x) is Path.TRITON:
        from sluice.kernels.adapters.kernel import add_adapters_triton as add
    else:
        from sluice.kernels.adapters.reference import add_adapters_reference as add
    add(out, x, bank, rows)


def _blocks(part_sizes: Sequence[int], rank: int) -> list[tuple[int, int, int]]:
    blocks: list[tuple[int, int, int]] = []
    column = 0
    for index, size in enumerate(part_sizes):
        end = column + size
        blocks += [
            (first, min(first + BLOCK_COLUMNS, end), index * rank) for first in range(column, end, BLOCK_COLUMNS)
        ]
        column = end
    return blocks
