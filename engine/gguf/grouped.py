"""Blocks of quantized weights in groups of 32: the same numbers, or rounded to 8 bits where groups have no such.

Q4_0, Q4_1, Q4_K, Q5_0, Q8_0 and MXFP4 are such groups. Q5_1, Q5_K and Q6_K are rounded once more.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sluice.engine.gguf.dequantize import dequantized, eights, fives, floats4, halves, k_scales, nibbles
from sluice.engine.gguf.types import BLOCKS, TensorType
from sluice.kernels.linear.grouped import GROUP, GroupedWeight, collected, grouped, packed_nibbles

_GROUP_BYTES = {TensorType.Q4_0: 20.0, TensorType.Q4_1: 20.0, TensorType.Q4_K: 18.5}
"""Of a group of 4 bits: its codes, scales and minimums."""

_ROWS_ELEMENTS = 2**16
"""Elements that are a byte each at a time."""


def grouped_tensor(stored: Tensor, kind: TensorType, shape: tuple[int, ...]) -> GroupedWeight | None:
    """Return the matrix that `stored`, bytes, holds, packed; None if the type has no blocks."""
    if kind not in _READERS:
        return None
    rows = stored.view(shape[0], -1)
    step = max(1, _ROWS_ELEMENTS // shape[1])
    return collected((_READERS[kind](rows[at : at + step], kind) for at in range(0, shape[0], step)), shape[0])


def packed_bits(kind: TensorType) -> int:
    """Return the bits of a packed code; 0 if the type has no blocks."""
    if kind not in _READERS:
        return 0
    return 4 if kind in _GROUP_BYTES else 8


def packed_bytes(kind: TensorType, num_elements: int) -> int:
    """Return what a matrix takes packed; 0 if its type has no blocks."""
    if kind not in _READERS:
        return 0
    return int(num_elements // GROUP * _GROUP_BYTES.get(kind, 34))


def _blocks(rows: Tensor, kind: TensorType) -> Tensor:
    return rows.reshape(-1, BLOCKS[kind][1])


def _of_blocks(rows: Tensor, codes: Tensor, scales: Tensor, minimums: Tensor | None = None) -> GroupedWeight:
    """Return rows of blocks that are a group each: codes `[blocks, 32]`, scales and minimums `[blocks, 1]`."""
    num_rows = rows.shape[0]
    codes = codes.view(num_rows, -1)
    return GroupedWeight(
        codes=codes if minimums is None else packed_nibbles(codes),
        scales=scales.view(num_rows, -1).half(),
        minimums=None if minimums is None else minimums.view(num_rows, -1).half(),
    )


def _q4_k(rows: Tensor, kind: TensorType) -> GroupedWeight:
    blocks, num_rows = _blocks(rows, kind), rows.shape[0]
    scales, minimums = k_scales(blocks)
    units = halves(blocks[:, :4]) * torch.tensor([1.0, -1.0])  # minimums are subtracted
    return GroupedWeight(
        codes=packed_nibbles(eights(blocks[:, 16:]).reshape(num_rows, -1)),
        scales=scales.reshape(num_rows, -1),
        minimums=minimums.reshape(num_rows, -1),
        units=units.view(num_rows, -1).half(),
    )


def _q4_0(rows: Tensor, kind: TensorType) -> GroupedWeight:
    blocks = _blocks(rows, kind)
    scales = halves(blocks[:, :2])
    return _of_blocks(rows, nibbles(blocks[:, 2:]), scales, -8 * scales)


def _q4_1(rows: Tensor, kind: TensorType) -> GroupedWeight:
    blocks = _blocks(rows, kind)
    scales, minimums = halves(blocks[:, :4]).chunk(2, dim=1)
    return _of_blocks(rows, nibbles(blocks[:, 4:]), scales.contiguous(), minimums.contiguous())


def _q5_0(rows: Tensor, kind: TensorType) -> GroupedWeight:
    blocks = _blocks(rows, kind)
    return _of_blocks(rows, fives(blocks).to(torch.int8) - 16, halves(blocks[:, :2]))


def _q8_0(rows: Tensor, kind: TensorType) -> GroupedWeight:
    blocks = _blocks(rows, kind)
    return _of_blocks(rows, blocks[:, 2:].contiguous().view(torch.int8), halves(blocks[:, :2]))


def _mxfp4(rows: Tensor, kind: TensorType) -> GroupedWeight:
    # Scales are powers of two; float16 has those from 2**-24 to 2**15.
    return _of_blocks(rows, *floats4(_blocks(rows, kind)))


def _rounded(rows: Tensor, kind: TensorType) -> GroupedWeight:
    return grouped(dequantized(rows, kind).view(rows.shape[0], -1), num_bits=8)


_READERS: Mapping[TensorType, Callable[[Tensor, TensorType], GroupedWeight]] = {
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q8_0: _q8_0,
    TensorType.MXFP4: _mxfp4,
    TensorType.Q5_1: _rounded,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _rounded,
    TensorType.Q6_K: _rounded,
}
