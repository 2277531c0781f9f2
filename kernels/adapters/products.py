"""The products of a model with the adapters that are loaded for it, by place. Knows no files and no steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sluice.kernels.adapters import AdapterBank, LowRank, RowPlaces, add_adapters
from sluice.kernels.adapters.native import NativeAdapter, NativeRows, ProductPairs
from sluice.kernels.gated_activation import gated_activation
from sluice.kernels.linear import Linear
from sluice.kernels.linear.native import NativeLinear
from sluice.kernels.linear.plain import GatedLinear


@dataclass(frozen=True, slots=True)
class StackedSizes:
    """Matrices `[N_i, K]` that a product stacks."""

    part_sizes: tuple[int, ...]
    in_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRoom:
    """What there must be room for."""

    num_places: int
    """Adapters that are loaded at once."""

    max_rank: int
    max_tokens: int
    """Rows of a step."""


class AdaptedProducts:
    """Products, and what each loaded adapter adds to them. Changes when an adapter is put in a place."""

    def __init__(
        self, products: Sequence[Linear | None], sizes: Sequence[StackedSizes], room: AdapterRoom, *, like: Tensor
    ) -> None:
        """Make room for adapters.

        Args:
            products: those that adapters change; None for one that they do not, which is not multiplied here.
            sizes: of each.
            room: what there must be room for.
            like: has the dtype and the device of the products' rows.
        """
        self._products, self._sizes = products, sizes
        self._banks = [
            None
            if product is None or isinstance(product, NativeLinear)
            else AdapterBank(of.part_sizes, of.in_size, rank=room.max_rank, num_places=room.num_places, like=like)
            for product, of in zip(products, sizes, strict=True)
        ]
        self._natives: list[NativeAdapter | None] = [None] * room.num_places
        # The last one is of rows without an adapter, whose place is -1.
        self._addresses = np.zeros(room.num_places + 1, dtype=np.uint64)
        most_ranks = max(len(of.part_sizes) for of in sizes) * room.max_rank
        has_native = any(isinstance(product, NativeLinear) for product in products)
        self._shrunk = torch.empty(room.max_tokens if has_native else 0, -(-most_ranks // 4) * 4)

    def put(self, place: int, pairs: Sequence[Sequence[LowRank | None]]) -> None:
        """Replace what is in a place by an adapter: for each product a pair for each matrix that it stacks."""
        native: list[ProductPairs | None] = []
        for product, bank, of, its_pairs in zip(self._products, self._banks, self._sizes, pairs, strict=True):
            if bank is not None:
                bank.put(place, its_pairs)
            native.append(
                ProductPairs(its_pairs, of.part_sizes, product.columns) if isinstance(product, NativeLinear) else None
            )
        if any(native):
            adapter = NativeAdapter(native)
            self._natives[place], self._addresses[place] = adapter, adapter.address

    def multiply(self, index: int, x: Tensor, rows: RowPlaces | None) -> Tensor:
        """Return a product of rows `[T, K]`, with what the adapter of each adds to it."""
        product, bank = self._products[index], self._banks[index]
        assert product is not None, "experts are not multiplied here"
        if rows is None:
            return product(x)
        if isinstance(product, NativeLinear):
            native = self.native_rows(rows)
            return product(x, native.of_product(index))
        assert bank is not None, "a product that is not native has a bank"
        if isinstance(product, GatedLinear):
            gate_up = product.product(x)
            add_adapters(gate_up, x, bank, rows)
            return gated_activation(gate_up, activation=product.activation)
        out = product(x)
        add_adapters(out, x, bank, rows)
        return out

    def native_rows(self, rows: RowPlaces) -> NativeRows:
        """Return the adapters of rows for native.c. Valid until another adapter is put in one of their places."""
        return NativeRows(self._addresses[rows.places.numpy()], self._shrunk)
