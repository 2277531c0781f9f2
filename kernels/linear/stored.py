"""The forms in which products take weights: plain, or packed as a file or a rounding has them."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from sluice.kernels.linear.float8 import Float8Weight, stacked_float8
from sluice.kernels.linear.grouped import GroupedWeight, stacked
from sluice.kernels.linear.int8 import Int8Weight

PackedWeight: TypeAlias = GroupedWeight | Int8Weight
PlainOrPacked: TypeAlias = Tensor | PackedWeight
"""What the CPU's native product multiplies."""

CodedWeight: TypeAlias = PackedWeight | Float8Weight
StoredWeight: TypeAlias = Tensor | CodedWeight


def stacked_coded(weights: Sequence[CodedWeight]) -> CodedWeight | None:
    """Stack rows; None if they are of forms that cannot be one."""
    in_float8 = [weight for weight in weights if isinstance(weight, Float8Weight)]
    if not in_float8:
        return stacked_packed([weight for weight in weights if not isinstance(weight, Float8Weight)])
    return stacked_float8(in_float8) if len(in_float8) == len(weights) else None


def stacked_packed(weights: Sequence[PackedWeight]) -> PackedWeight | None:
    """Stack rows; None if they are of forms that cannot be one."""
    in_groups = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    in_int8 = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if not in_int8:
        return stacked(in_groups)
    if in_groups:
        return None
    codes, scales = ([getattr(weight, name) for weight in in_int8] for name in ("codes", "scales"))
    return Int8Weight(codes=torch.cat(codes), scales=torch.cat(scales))


def is_on_gpu(weight: StoredWeight) -> bool:
    """Return whether a weight is on a GPU."""
    return (weight if isinstance(weight, Tensor) else weight.codes).is_cuda
