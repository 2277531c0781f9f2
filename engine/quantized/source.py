"""The tensors of one quantized matrix in a file, and the checks that every format makes of them."""

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.quantized.matrix import StoredMatrix

Form: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


class Source(Protocol):
    """Tensors of a file by their names."""

    def form_of(self, name: str) -> Form | None:
        """Return dtype and shape, as the file's header has them; None without such a tensor."""
        ...

    def stored(self, name: str) -> Tensor:
        """Return a tensor, memory-mapped, whatever its dtype.

        Raises:
            ModelFolderError: it cannot be read.
        """
        ...


class Format(Protocol):
    """How the matrices of one folder are stored."""

    @property
    def description(self) -> str:
        """For people: its name and what it states."""
        ...

    def matrix(self, source: Source, module: str) -> StoredMatrix | None:
        """Return the matrix of a module; None if it is not quantized.

        Raises:
            ModelFolderError: its tensors do not belong to each other.
        """
        ...


_NOT_SET = -1
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of scales."""


def form_required(
    source: Source, name: str, dtypes: tuple[torch.dtype, ...], num_dimensions: int = 2
) -> tuple[int, ...]:
    """Return the shape of a tensor of one of `dtypes`.

    Raises:
        ModelFolderError: it is missing, has another dtype or another number of dimensions, or is empty.
    """
    form = source.form_of(name)
    if form is None:
        raise ModelFolderError(f"the weights have no tensor {name!r}: they do not belong to this config.json.")
    dtype, shape = form
    if dtype not in dtypes or len(shape) != num_dimensions or 0 in shape:
        wanted = " or ".join(_name(each) for each in dtypes)
        raise ModelFolderError(
            f"tensor {name!r} is {_name(dtype)} {shape}, expected {wanted} of {num_dimensions} dimensions."
        )
    return shape


def check_shapes(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check tensors that must belong to another.

    Raises:
        ModelFolderError: one is not of its shape.
    """
    for name, shape in shapes.items():
        form = source.form_of(name)
        if form is None or form[1] != shape:
            found = "missing" if form is None else str(form[1])
            raise ModelFolderError(f"tensor {name!r} is {found}, the other tensors of its matrix expect {shape}.")


def order_of(source: Source, name: str, in_size: int, group_size: int) -> Tensor | None:
    """Return the group of each element of a row, `[K]`; None if they are in order, or there is no such tensor.

    Raises:
        ModelFolderError: it is not of the matrix.
    """
    if source.form_of(name) is None:
        return None
    form_required(source, name, (torch.int32, torch.int64), num_dimensions=1)
    check_shapes(source, {name: (in_size,)})
    groups = source.stored(name).long()
    if torch.equal(groups, torch.arange(in_size) // group_size) or bool((groups == _NOT_SET).all()):
        return None
    if int(groups.min()) < 0 or int(groups.max()) >= -(-in_size // group_size):
        raise ModelFolderError(f"tensor {name!r} names groups that its matrix does not have.")
    return groups


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
