"""Matrix products by native.c: bfloat16 rows, over weights in bfloat16, int8 or groups, packed into panels once.

Each result is summed along K in one order for any number of rows: a token's bits do not depend on its batch. Weights in
int8 have one scale per output column; rows in int8 have one scale each, computed when they are multiplied. Weights in
groups of 32 (`grouped.py`) have scales for each group, and so have their rows.
"""

import ctypes
from enum import IntEnum

import torch
from torch import Tensor

from sluice.kernels.adapters.native import NO_ADAPTERS, AdaptersStruct
from sluice.kernels.linear.grouped import GROUP, UNIT_GROUPS, GroupedWeight
from sluice.kernels.linear.int8 import Int8Weight, rounded_to_int8
from sluice.kernels.linear.stored import PlainOrPacked
from sluice.kernels.native import native_function
from sluice.kernels.pages import zero_pages
from sluice.kernels.tiles import may_use_tiles

PACK = ("sluice_pack", "ppll")
PRODUCT = ("sluice_product", "plpplliippp")
ROWS = ("sluice_rows", "pppll")
ROW_BYTES = ("sluice_row_bytes", "pp")
_CPU = torch.device("cpu")
_PANEL = 32
_STEP_WORDS = 16
_GATE_COLUMNS = 16
_GROUP_ROWS = 8
_LINE_BYTES = 64


class Epilogue(IntEnum):
    """Epilogue of a product, numbered as in parts.h."""

    STORE = 0
    ADD = 1
    GATE_SILU = 2
    GATE_GELU_TANH = 3
    GATE_SWIGLU_CLAMPED = 4


class Kind(IntEnum):
    """Kind of a weight, numbered as in parts.h."""

    BF16 = 0
    INT8 = 1
    GROUPS4 = 2
    GROUPS8 = 3
    UNITS4 = 4
    SPANS4 = 5
    SPANS8 = 6


class WeightStruct(ctypes.Structure):
    """`Weight` of parts.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("N", ctypes.c_int64),
        ("K", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("span", ctypes.c_int64),
        ("order", ctypes.c_void_p),
    )


class NativeLinear:
    """A product over a weight in panels, with its epilogue."""

    def __init__(
        self,
        weight: PlainOrPacked,
        bias: Tensor | None,
        *,
        epilogue: Epilogue = Epilogue.STORE,
        is_int8: bool = False,
    ) -> None:
        """Pack `weight` `[N, K]`, bfloat16, in groups or in int8.

        For a gate, N is the rows of the gate followed by as many of the up projection; K is unchanged.
        """
        self._epilogue = epilogue
        self._is_gate = epilogue >= Epilogue.GATE_SILU
        if self._is_gate:
            weight = _interleaved(weight) if isinstance(weight, Tensor) else weight.map(_interleaved)
            bias = None if bias is None else _interleaved(bias)
        self._bias = None if bias is None else bias.contiguous()
        if is_int8 and isinstance(weight, Tensor):
            weight = rounded_to_int8(weight)
        self._scales = weight.scales.contiguous() if isinstance(weight, Int8Weight) else None
        in_groups = weight if isinstance(weight, GroupedWeight) else None
        self._order = None if in_groups is None else in_groups.order
        num_rows, self.in_size = weight.shape
        self.kind, self._panels = _packed(weight)
        self.out_size = num_rows // 2 if self._is_gate else num_rows
        self.struct = WeightStruct(
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            None if self._scales is None else self._scales.data_ptr(),
            num_rows,
            self.in_size,
            self.kind,
            1 if in_groups is None else in_groups.span,
            None if self._order is None else self._order.data_ptr(),
        )
        self.row_bytes = _row_bytes(self.struct)
        """Bytes of a row of x in 8 bits; 0 if it is read as it is."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight that the product reads."""
        return self._panels.nbytes

    @property
    def num_weights(self) -> int:
        """Multiplications per row."""
        return self.struct.N * self.in_size

    @property
    def columns(self) -> Tensor | None:
        """Which row of the weight each column of the product is, `[N]` int64; None: they have one order."""
        return _interleaved(torch.arange(self.struct.N)) if self._is_gate else None

    def rows(self, ids: Tensor, *, out: Tensor) -> None:
        """Write the rows `ids` `[T]` int64 of the weight to `out` `[T, K]` bfloat16, dequantized. Not for gates."""
        native = native_function(*ROWS)
        assert native is not None, "native products exist only with the native library"
        native(ctypes.addressof(self.struct), ids.data_ptr(), out.data_ptr(), out.stride(0), ids.shape[0])

    def __call__(self, x: Tensor, adapters: AdaptersStruct = NO_ADAPTERS) -> Tensor:
        """Multiply `x` `[T, K]` to `[T, N]`, or `[T, N / 2]` for a gate, with what adapters add before it."""
        native = native_function(*PRODUCT)
        assert native is not None, "native products exist only with the native library"
        num_tokens = x.shape[0]
        out = x.new_empty(num_tokens, self.out_size)
        rows = scales = None
        if self.row_bytes:
            rows = torch.empty(whole_rows(num_tokens), self.row_bytes, dtype=torch.int8)
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
            ctypes.addressof(adapters),
        )
        return out


def whole_rows(num_rows: int) -> int:
    """Return for how many rows in 8 bits there must be room: groups have eight rows beside each other."""
    return -(-num_rows // _GROUP_ROWS) * _GROUP_ROWS


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


def _packed(weight: PlainOrPacked) -> tuple[Kind, Tensor]:
    """Return the kind of a weight, and its panels."""
    if isinstance(weight, Int8Weight):
        return Kind.INT8, _panels(weight.codes)
    if isinstance(weight, Tensor):
        return Kind.BF16, _panels(weight)
    return _kind_of(weight), _group_panels(weight) if weight.zeros is None else _span_panels(weight, weight.zeros)


def _kind_of(weight: GroupedWeight) -> Kind:
    if weight.zeros is not None:
        return Kind.SPANS8 if weight.num_bits == 8 else Kind.SPANS4
    if weight.units is not None:
        return Kind.UNITS4
    return Kind.GROUPS8 if weight.minimums is None else Kind.GROUPS4


def _group_panels(weight: GroupedWeight) -> Tensor:
    """Pack `weight` into the panels of linear/groups.h: groups of codes, scales and minimums, then units."""
    num_rows, in_size = weight.shape
    num_groups = in_size // GROUP
    parts = {name: part.view(torch.int32) if name == "codes" else part for name, part in weight.parts.items()}
    units = parts.pop("units", None)
    sizes = [_PANEL * part.nbytes // num_rows // num_groups for part in parts.values()]
    units_bytes = 0 if units is None else _PANEL * units.nbytes // num_rows
    panels = zero_pages((-(-num_rows // _PANEL), num_groups * sum(sizes) + units_bytes), torch.uint8, _CPU)
    groups = panels[:, : num_groups * sum(sizes)].unflatten(1, (num_groups, -1))
    for part, place in zip(parts.values(), groups.split(sizes, dim=2), strict=True):
        _fill_columns(place, part)
    if units is not None:
        _fill_columns(panels[:, num_groups * sum(sizes) :].unflatten(1, (num_groups // UNIT_GROUPS, -1)), units)
    return panels


def _span_panels(weight: GroupedWeight, zeros: Tensor) -> Tensor:
    """Pack `weight`, whose groups share scales and `zeros`, into the panels of linear/groups.h."""
    num_rows, in_size = weight.shape
    num_groups, num_spans = in_size // GROUP, zeros.shape[1]
    code_bytes, scale_bytes, zero_bytes = (_PANEL * part.nbytes // num_rows for part in weight.parts.values())
    line = -(code_bytes + scale_bytes + zero_bytes) % _LINE_BYTES
    panels = zero_pages((-(-num_rows // _PANEL), code_bytes + scale_bytes + zero_bytes + line), torch.uint8, _CPU)
    codes, scales, zero_codes, _ = panels.split([code_bytes, scale_bytes, zero_bytes, line], dim=1)
    _fill_columns(codes.unflatten(1, (num_groups, -1)), weight.codes.view(torch.int32))
    _fill_columns(scales.unflatten(1, (num_spans, -1)), weight.scales)
    _fill_columns(zero_codes.unflatten(1, (num_spans, -1)), zeros)
    return panels


def _fill_columns(place: Tensor, part: Tensor) -> None:
    """Write rows `[N, groups * numbers]` to bytes `[panels, groups, .]`: 32 rows' numbers beside each other."""
    num_rows = part.shape[0]
    into = place.view(part.dtype).unflatten(2, (-1, _PANEL))  # [panels, groups, numbers, 32]
    columns = part.unflatten(1, (place.shape[1], -1))  # [N, groups, numbers]
    whole = num_rows // _PANEL * _PANEL
    into[: whole // _PANEL] = columns[:whole].unflatten(0, (-1, _PANEL)).permute(0, 2, 3, 1)
    if whole < num_rows:
        into[-1, :, :, : num_rows - whole] = columns[whole:].permute(1, 2, 0)


def _row_bytes(weight: WeightStruct) -> int:
    native = native_function(*ROW_BYTES)
    assert native is not None, "native products exist only with the native library"
    answer = torch.zeros(1, dtype=torch.int64)
    if weight.kind != Kind.BF16:
        native(ctypes.addressof(weight), answer.data_ptr())
    return int(answer)


def _interleaved(gate_up: Tensor) -> Tensor:
    """Interleave rows: a run of the gate, then the same run of the up projection."""
    halves = gate_up.unflatten(0, (2, -1, _GATE_COLUMNS))
    return halves.transpose(0, 1).flatten(0, 2)
