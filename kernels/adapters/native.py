"""Adapters of the native products on a CPU: packed once, and added in a product's epilogue (linear/adapters.h)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice.kernels.adapters import LowRank

_COLUMNS = 16
_PANEL = 32
_DOWN_ROWS = 4
"""`R` of parts.h is a multiple of this, and `rank` of 2."""


class AdapterStruct(ctypes.Structure):
    """`Adapter` of parts.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("down", "up", "sources")),
        *((name, ctypes.c_int64) for name in ("R", "K", "rank")),
    )


class AdaptersStruct(ctypes.Structure):
    """`Adapters` of parts.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "shrunk")),
        *((name, ctypes.c_int64) for name in ("index", "stride")),
    )


NO_ADAPTERS = AdaptersStruct()


@dataclass(frozen=True, slots=True)
class ProductPairs:
    """What an adapter adds to one product, and how that product orders its columns."""

    pairs: Sequence[LowRank | None]
    """One for each of the matrices that the product stacks."""

    sizes: Sequence[int]
    """Rows of each matrix."""

    columns: Tensor | None
    """`[N]` int64: which row of the stacked matrices each column of the product is; None: the same."""


class NativeAdapter:
    """One adapter for all products of a model, packed for native.c."""

    def __init__(self, products: Sequence[ProductPairs | None]) -> None:
        """Pack what the adapter adds to each product; None where it adds nothing, or the product is not native."""
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        self.num_ranks = 0
        """Most numbers of a row between the two products."""

        self.structs = (AdapterStruct * len(products))(*map(self._packed, products))

    @property
    def address(self) -> int:
        """The first of its structures; valid as long as this object."""
        return ctypes.addressof(self.structs)

    @property
    def num_bytes(self) -> int:
        """Bytes of its matrices."""
        return sum(part.nbytes for parts in self._kept for part in parts)

    def _packed(self, product: ProductPairs | None) -> AdapterStruct:
        if product is None or all(pair is None for pair in product.pairs):
            return AdapterStruct()
        down, up = _stacked(product)
        packed, sources = _panels(up)
        self._kept.append((down, packed, sources))
        self.num_ranks = max(self.num_ranks, down.shape[0])
        rank = packed.shape[1] * 2
        return AdapterStruct(down.data_ptr(), packed.data_ptr(), sources.data_ptr(), down.shape[0], down.shape[1], rank)


class NativeRows:
    """The adapters of a step's rows as pointers for native.c, and the memory for what is between their products."""

    def __init__(self, rows: NDArray[np.uint64], shrunk: Tensor) -> None:
        self.rows, self.shrunk = rows, shrunk

    @property
    def address(self) -> int:
        """Of the pointers; valid as long as this object."""
        return self.rows.ctypes.data

    def of_product(self, index: int) -> AdaptersStruct:
        """Return the structure for one product; valid as long as this object."""
        return AdaptersStruct(self.address, self.shrunk.data_ptr(), index, self.shrunk.stride(0))


def _stacked(product: ProductPairs) -> tuple[Tensor, Tensor]:
    """Return the pairs of a product as one: `down` `[R, K]`, and `up` `[N, R]` with zeros between matrices."""
    pairs = [pair for pair in product.pairs if pair is not None]
    num_ranks = sum(pair.down.shape[0] for pair in pairs)
    padded = -(-num_ranks // _DOWN_ROWS) * _DOWN_ROWS
    down = torch.zeros(padded, pairs[0].down.shape[1], dtype=torch.bfloat16)
    up = torch.zeros(sum(product.sizes), padded, dtype=torch.bfloat16)
    column = rank = 0
    for size, pair in zip(product.sizes, product.pairs, strict=True):
        if pair is not None:
            ranks = slice(rank, rank + pair.down.shape[0])
            down[ranks] = pair.down
            up[column : column + size, ranks] = pair.up
            rank = ranks.stop
        column += size
    return down, up if product.columns is None else up[product.columns]


def _panels(up: Tensor) -> tuple[Tensor, Tensor]:
    """Pack `up` `[N, R]` as `[groups, rank / 2, 16]` pairs, for each 16 columns the ranks that they read.

    Returns:
        the pairs, as int32, and `[groups]` int32, the first rank of each group.
    """
    num_columns, num_ranks = up.shape
    num_groups = -(-num_columns // _PANEL) * (_PANEL // _COLUMNS)
    padded = torch.zeros(num_groups * _COLUMNS, num_ranks, dtype=up.dtype)
    padded[:num_columns] = up
    groups = padded.unflatten(0, (num_groups, _COLUMNS))
    is_read = (groups != 0).any(dim=1)  # [groups, R]
    numbers = torch.arange(num_ranks)
    first = torch.where(is_read, numbers, num_ranks).amin(dim=1)
    end = torch.where(is_read, numbers + 1, 0).amax(dim=1)
    rank = min(num_ranks, max(2, int((end - first).amax()) + 1) // 2 * 2)
    sources = first.clamp(max=num_ranks - rank)
    ranks = sources[:, None] + torch.arange(rank)  # [groups, rank]
    read = groups.gather(2, ranks[:, None, :].expand(-1, _COLUMNS, -1))  # [groups, 16, rank]
    pairs = read.unflatten(2, (rank // 2, 2)).transpose(1, 2).contiguous()  # [groups, rank / 2, 16, 2]
    return pairs.view(torch.int32).squeeze(-1), sources.to(torch.int32)
