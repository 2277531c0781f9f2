"""The definition of what adapters add, with torch's operators; also the path where there is no kernel."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sluice.kernels.adapters import AdapterBank, RowPlaces


def add_adapters_reference(out: Tensor, x: Tensor, bank: "AdapterBank", rows: "RowPlaces") -> None:
    """Add to `out` `[T, N]` the products of `x` `[T, K]` with each row's adapter; see `add_adapters`.

    Nothing of the device is read: each adapter is multiplied with all rows, and others keep what they have.
    """
    for place in rows.used:
        of_place = (rows.places == place)[:, None]  # [T, 1]
        shrunk = x.float() @ bank.down[place].float().T  # [T, parts * rank]
        column = 0
        for index, size in enumerate(bank.part_sizes):
            columns = slice(column, column + size)
            numbers = shrunk[:, index * bank.rank : (index + 1) * bank.rank]
            added = out[:, columns].float() + numbers @ bank.up[place, columns].float().T
            out[:, columns] = torch.where(of_place, added.to(out.dtype), out[:, columns])
            column += size
