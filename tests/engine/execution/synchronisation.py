"""Detection of operators that make the host wait for the device."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

SYNCHRONISING = frozenset({
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select,
    aten.repeat_interleave, aten._unique2, aten.unique_consecutive, aten.bincount,
})  # fmt: skip
"""Their results, or the sizes of these, depend on values that only the device knows."""


class Synchronises(AssertionError):
    """An operator for which the host waits."""


class NoSynchronisation(TorchDispatchMode):
    """A mode in which such operators, indexing with masks and copies from the device to the host fail.

    On the CPU every tensor counts as the device's, so that only copies are not detected.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # torch's own types
        if func.overloadpacket in SYNCHRONISING or _has_mask(func.overloadpacket, args):
            raise Synchronises(f"{func} waits for the device")
        # Before the call: copy_ writes to its first argument.
        given = {tensor.device.type for tensor in _tensors([args, kwargs])}
        result = func(*args, **(kwargs or {}))
        if given - {"cpu"} and "cpu" in {tensor.device.type for tensor in _tensors(result)}:
            raise Synchronises(f"{func} copies to the host")
        return result


def _has_mask(operator: object, args: Sequence[Any]) -> bool:  # torch's own types
    is_index = operator in (aten.index, aten.index_put, aten.index_put_)
    return is_index and any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))


def _tensors(values: object) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))
