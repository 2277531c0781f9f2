"""Matrix products by native.c: bfloat16 rows, over weights in bfloat16 or int8 packed into panels once.

Each result is summed along K in one order for any number of rows: a token's bits do not depend on its batch. Weights in
int8 have one scale per output column; rows in int8 have one scale each, computed when they are multiplied.
"""

import ctypes
from enum import IntEnum

import torch
from torch import Tensor

from sluice.kernels.linear.int8 import quantized
from sluice.kernels.native import native_function
from sluice.kernels.pages import zero_pages
from sluice.kernels.tiles import may_use_tiles

PACK = ("sluice_pack", "ppll")
PRODUCT = ("sluice_product", "plpplliipp")
_CPU = torch.device("cpu")
_PANEL = 32
_STEP_WORDS = 16
_GATE_COLUMNS = 16


class Epilogue(IntEnum):
    """Epilogue of a product, numbered as in parts.h."""

    STORE = 0
    ADD = 1
    GATE_SILU = 2
    GATE_GELU_TANH = 3


class WeightStruct(ctypes.Structure):
    """`Weight` of parts.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("N", ctypes.c_int64),
        ("K", ctypes.c_int64),
    )


class NativeLinear:
    """A product over a weight in panels, with its epilogue."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, epilogue: Epilogue = Epilogue.STORE, is_int8: bool = False
    ) -> None:
        """Pack `weight` `[N, K]` bfloat16.

        For a gate, N is the rows of the gate followed by as many of the up projection; K is unchanged.
        """
        self._epilogue = epilogue
        self._is_gate = epilogue in (Epilogue.GATE_SILU, Epilogue.GATE_GELU_TANH)
        if self._is_gate:
            weight = _interleaved(weight)
            bias = None if bias is None else _interleaved(bias)
        self._bias = None if bias is None else bias.contiguous()
        self._scales = None
        num_rows, self.in_size = weight.shape
        if is_int8:
            weight, self._scales = quantized(weight)
        self._panels = _panels(weight)
        self.out_size = num_rows // 2 if self._is_gate else num_rows
        self.struct = WeightStruct(
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            None if self._scales is None else self._scales.data_ptr(),
            num_rows,
            self.in_size,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight that the product reads."""
        return self._panels.nbytes

    @property
    def num_weights(self) -> int:
        """Multiplications per row."""
        return self.struct.N * self.in_size

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, N]`, or `[T, N / 2]` for a gate."""
        native = native_function(*PRODUCT)
        assert native is not None, "native products exist only with the native library"
        num_tokens = x.shape[0]
        out = x.new_empty(num_tokens, self.out_size)
        rows = scales = None
        if self._scales is not None:
            rows = torch.empty(num_tokens, self.in_size, dtype=torch.int8)
            scales = torch.empty(num_tokens, dtype=torch.float32)
        native(
            x.data_ptr(),
            x.stride(0) * x.element_size(),
            ctypes.addressof(self.struct),
            out.data_ptr(),
            self.out_size * x.element_size(),
            num_tokens,
            self._epilogue,
            may_use_tiles(),
            None if rows is None else rows.data_ptr(),
            None if scales is None else scales.data_ptr(),
        )
        return out


def can_multiply(in_size: int, *, is_int8: bool) -> bool:
    """Whether rows of this length are whole steps."""
    return in_size % (_STEP_WORDS * (4 if is_int8 else 2)) == 0


def _panels(weight: Tensor) -> Tensor:
    """Pack `weight` into the layout of parts.h."""
    native = native_function(*PACK)
    assert native is not None, "native products exist only with the native library"
    weight = weight.contiguous()
    num_rows, num_words = weight.shape[0], weight.shape[1] * weight.element_size() // 4
    steps = -(-num_words // _STEP_WORDS)
    panels = zero_pages((-(-num_rows // _PANEL), steps, 2, _STEP_WORDS, 16), torch.int32, _CPU)
    native(weight.data_ptr(), panels.data_ptr(), num_rows, num_words)
    return panels


def _interleaved(gate_up: Tensor) -> Tensor:
    """Interleave rows: a run of the gate, then the same run of the up projection."""
    halves = gate_up.unflatten(0, (2, -1, _GATE_COLUMNS))
    return halves.transpose(0, 1).flatten(0, 2)
