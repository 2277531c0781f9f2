"""Blocks of quantized weights as float32, each in the order of operations of ggml, so that the bits are the same.

A block is a row of bytes. `d` is its scale, `m` its minimum, `q` its codes.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sluice.engine.gguf.types import BLOCKS, TensorType

_DTYPES = {TensorType.F32: torch.float32, TensorType.F16: torch.float16, TensorType.BF16: torch.bfloat16}

_SIZES = [0, 1, 2, 3, 4, 6, 8, 12]
_DOUBLED = torch.tensor([*_SIZES, *(-size for size in _SIZES)], dtype=torch.int8)
"""Twice the numbers of MXFP4, by their codes."""

_ROWS_ELEMENTS = 2**16
"""Elements that are in float32 at a time."""


def plain_dtype(kind: TensorType) -> torch.dtype | None:
    """Return the dtype of a type without blocks; None for the others."""
    return _DTYPES.get(kind)


def dequantize_into(out: Tensor, stored: Tensor, kind: TensorType) -> None:
    """Write the numbers of `stored`, bytes, to `out` `[..., N]` in its dtype, a few rows at a time."""
    rows = out.view(-1, out.shape[-1])
    packed = stored.view(rows.shape[0], -1)
    step = max(1, _ROWS_ELEMENTS // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        part.copy_(dequantized(packed[start : start + step], kind).view(part.shape))


def dequantized(stored: Tensor, kind: TensorType) -> Tensor:
    """Return the numbers of whole blocks, bytes, in float32 (or the plain type): `[blocks, N]`."""
    plain = plain_dtype(kind)
    if plain is not None:
        # A file aligns tensors as it states, which may be less than torch needs.
        return stored.clone().view(plain)
    return _DECODERS[kind](stored.view(-1, BLOCKS[kind][1]))


def halves(blocks: Tensor) -> Tensor:
    """Return pairs of bytes as float16, widened."""
    return blocks.contiguous().view(torch.float16).float()


def nibbles(codes: Tensor) -> Tensor:
    """Return the low halves of bytes, then the high ones, `[blocks, 2 * N]`."""
    return torch.cat([codes & 15, codes >> 4], dim=-1)


def _high_bits(words: Tensor) -> Tensor:
    """Return bit i of four bytes as 16 at element i, `[blocks, 32]`."""
    bits = (words[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1  # [blocks, 4, 8]
    return bits.flatten(1) << 4


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * halves(blocks[:, :2])


def _q4_0(blocks: Tensor) -> Tensor:
    return halves(blocks[:, :2]) * (nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    d, m = halves(blocks[:, :4]).chunk(2, dim=1)
    return d * nibbles(blocks[:, 4:]).float() + m


def fives(blocks: Tensor) -> Tensor:
    """Return the codes of blocks of Q5_0, `[blocks, 32]`."""
    return nibbles(blocks[:, 6:]) | _high_bits(blocks[:, 2:6])


def _q5_0(blocks: Tensor) -> Tensor:
    return halves(blocks[:, :2]) * (fives(blocks).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    d, m = halves(blocks[:, :4]).chunk(2, dim=1)
    return d * (nibbles(blocks[:, 8:]) | _high_bits(blocks[:, 4:8])).float() + m


def floats4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of blocks of MXFP4, doubled, `[blocks, 32]` int8, and half their scales `[blocks, 1]`."""
    return _DOUBLED[nibbles(blocks[:, 1:]).int()], torch.ldexp(torch.ones(len(blocks), 1), blocks[:, :1].int() - 128)


def _mxfp4(blocks: Tensor) -> Tensor:
    doubled, scales = floats4(blocks)
    return scales * doubled.float()


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minimums of the eight parts of a block of 4 or 5 bits, `[blocks, 8]` each, in its units."""
    low, middle, high = blocks[:, 4:16].chunk(3, dim=1)
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=1)
    minimums = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], dim=1)
    return scales, minimums


def _k_steps(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minimums as numbers, `[blocks, 8, 1]` each."""
    d, m = halves(blocks[:, :4]).chunk(2, dim=1)
    scales, minimums = k_scales(blocks)
    return (d * scales.float())[:, :, None], (m * minimums.float())[:, :, None]


def eights(codes: Tensor) -> Tensor:
    """Return the 4 bits of eight parts, from bytes `[blocks, 128]`: `[blocks, 8, 32]`."""
    return nibbles(codes.reshape(-1, 4, 32)).view(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_steps(blocks)
    return (scales * eights(blocks[:, 16:]).float() - minimums).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_steps(blocks)
    # Bit i of a byte belongs to part i.
    high = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1  # [blocks, 8, 32]
    q = eights(blocks[:, 48:]) | (high << 4)
    return (scales * q.float() - minimums).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3  # [blocks, 2, 4, 32]
    q = (low | (high << 4)).view(-1, 16, 16).float() - 32
    scales = halves(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (scales[:, :, None] * q).flatten(1)


_DECODERS: Mapping[TensorType, Callable[[Tensor], Tensor]] = {
    TensorType.Q8_0: _q8_0,
    TensorType.MXFP4: _mxfp4,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
}
