"""Matrix products on the CPU: native.c for int8 and groups, for bfloat16 if the processor multiplies it; else torch's.

Only those of native.c are bitwise identical for any batch composition, so a deterministic process uses no others.

For torch, the faster of the plain call and oneDNN's prepacked one is chosen per shape. Packing is slower for some
shapes and machines, and one row can be slower than four, so both are measured when the first weight of a shape is
packed: a few calls each, at one and at sixteen rows.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sluice.kernels.chain import is_deterministic
from sluice.kernels.checks import check
from sluice.kernels.gated_activation import Activation
from sluice.kernels.linear import onednn
from sluice.kernels.linear.float8 import Float8Weight
from sluice.kernels.linear.grouped import GroupedWeight
from sluice.kernels.linear.int8 import Int8Weight
from sluice.kernels.linear.native import PRODUCT, Epilogue, NativeLinear, can_multiply
from sluice.kernels.linear.plain import GatedLinear, Linear, PlainLinear
from sluice.kernels.linear.stored import CodedWeight, PackedWeight, StoredWeight
from sluice.kernels.native import native_function

_GATES: dict[Activation, Epilogue] = {
    "silu": Epilogue.GATE_SILU,
    "gelu_tanh": Epilogue.GATE_GELU_TANH,
    "swiglu_clamped": Epilogue.GATE_SWIGLU_CLAMPED,
}

_MEASURED_ELEMENTS = 2**18
"""Elements below which a weight is not measured and stays as it is."""

_REPEATS = 7
_PADDED_ROWS = 4
_CLEARLY = 0.8
"""An alternative must take less than this share of the time to be chosen, since a busy machine distorts
measurements.
"""


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice for products of one shape."""

    is_packed: bool
    min_rows: int
    """Fewer rows are padded to this number."""


_choices: dict[tuple[torch.Size, torch.dtype], _Choice] = {}
"""Choices measured in this process."""


class PackedLinear:
    """oneDNN's product over a prepacked weight."""

    def __init__(self, packed: Tensor, bias: Tensor | None, min_rows: int) -> None:
        self._packed = packed
        self._bias = bias
        self._min_rows = min_rows

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, N]`."""
        num_rows = x.shape[0]
        if 0 < num_rows < self._min_rows:
            padded = x.new_zeros(self._min_rows, x.shape[1])
            padded[:num_rows] = x
            return onednn.product(padded, self._packed, self._bias)[:num_rows]
        return onednn.product(x, self._packed, self._bias)


def pack_linear_cpu(weight: StoredWeight, bias: Tensor | None, *, is_int8: bool) -> Linear:
    """Prepare one product in the fastest way, packed as it is, or in int8.

    Raises:
        ValueError: int8 is not supported for it, or there are no products of packed weights.
    """
    if not isinstance(weight, Tensor):
        return NativeLinear(_checked(weight), bias)
    if is_int8:
        _check_int8(weight)
    if is_int8 or _is_native(weight):
        return NativeLinear(weight, bias, is_int8=is_int8)
    return _pack_torch(weight, bias)


def pack_gated_linear_cpu(
    weight: StoredWeight, bias: Tensor | None, *, activation: Activation, is_int8: bool
) -> Linear:
    """Prepare a gated product: as `pack_linear_cpu`, the first half of columns gating the second."""
    if not isinstance(weight, Tensor):
        weight = _checked(weight)
        check(weight.shape[0] % 32 == 0, "packed gates need a multiple of 16 columns, got {}", weight.shape)
        return NativeLinear(weight, bias, epilogue=_GATES[activation])
    if is_int8:
        _check_int8(weight)
        check(weight.shape[0] % 32 == 0, "int8 needs gates of a multiple of 16 columns, got {}", weight.shape)
    if is_int8 or (_is_native(weight) and weight.shape[0] % 32 == 0):
        return NativeLinear(weight, bias, epilogue=_GATES[activation], is_int8=is_int8)
    return GatedLinear(_pack_torch(weight, bias), activation)


def _is_native(weight: Tensor) -> bool:
    """Whether a product is native. In a deterministic process it is where it could be, however slow it is here."""
    if weight.dtype != torch.bfloat16 or not can_multiply(weight.shape[1], is_int8=False):
        return False
    return is_deterministic() or multiplies_bfloat16()


def _check_native(form: str) -> None:
    check(native_function(*PRODUCT) is not None, "{} needs the native kernels: install a C compiler", form)


def _checked(weight: CodedWeight) -> PackedWeight:
    """Return a weight that there is a product for."""
    assert not isinstance(weight, Float8Weight), "only a GPU multiplies FP8"
    _check_native("int8" if isinstance(weight, Int8Weight) else "groups")
    is_whole = isinstance(weight, GroupedWeight) or can_multiply(weight.shape[1], is_int8=True)
    check(is_whole, "int8 needs rows of a multiple of 64, got {}", weight.shape[1])
    return weight


def _check_int8(weight: Tensor) -> None:
    _check_native("int8")
    check(weight.dtype == torch.bfloat16, "int8 needs a model in bfloat16, got {}", weight.dtype)
    check(can_multiply(weight.shape[1], is_int8=True), "int8 needs rows of a multiple of 64, got {}", weight.shape[1])


@cache
def multiplies_bfloat16() -> bool:
    """Whether the library exists and was built for a processor that multiplies bfloat16."""
    ask = native_function("sluice_multiplies_bfloat16", "p")
    answer = torch.zeros(1, dtype=torch.int32)
    if ask is not None:
        ask(answer.data_ptr())
    return bool(answer)


def _pack_torch(weight: Tensor, bias: Tensor | None) -> Linear:
    if weight.numel() < _MEASURED_ELEMENTS:
        return PlainLinear(weight, bias)
    key = (weight.shape, weight.dtype)
    choice = _choices.get(key)
    packed = onednn.reorder(weight) if choice is None or choice.is_packed else None
    if packed is None:
        return PlainLinear(weight, bias)
    if choice is None:
        choice = _choices[key] = _measure(weight, packed)
    return PackedLinear(packed, bias, choice.min_rows) if choice.is_packed else PlainLinear(weight, bias)


def _measure(weight: Tensor, packed: Tensor) -> _Choice:
    def seconds(linear: Linear, num_rows: int) -> float:
        x = torch.ones(num_rows, weight.shape[1], dtype=weight.dtype)
        return _best_s(lambda: linear(x))

    plain, prepacked = PlainLinear(weight, None), PackedLinear(packed, None, 1)
    one, few = seconds(prepacked, 1), seconds(prepacked, _PADDED_ROWS)
    packed_s = min(one, few) + seconds(prepacked, 16)
    plain_s = seconds(plain, 1) + seconds(plain, 16)
    return _Choice(
        is_packed=plain_s > _CLEARLY * packed_s,
        min_rows=_PADDED_ROWS if few < _CLEARLY * one else 1,
    )


def _best_s(call: Callable[[], object]) -> float:
    """Return seconds of the fastest of a few calls."""
    times: list[float] = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
