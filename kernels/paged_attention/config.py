# Triton's power of two is a constexpr to the type checker.
# pyright: basic, reportArgumentType=false
"""Configurations of paged attention: a pure function of dtype, shape and phase, never of the number of sequences."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from sluice.kernels.paged_attention.layout import KVCache
from sluice.kernels.tuned import chosen, key_of


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Tiling of one launch. It determines the bits of the result."""

    block_rows: int
    """Query rows (tokens times heads of a group) per program."""

    tile: int
    """Keys per step of the inner loop."""

    num_warps: int
    num_stages: int


def attention_config(
    *, element_bytes: int, head_size: int, group: int, max_query_len: int, is_fp8: bool = False
) -> AttentionConfig:
    """Choose the tiling from dtype, head size, heads per key-value head and phase, never from the number of sequences.

    The numbers keep every case free of register spills on sm_90, and decodes at two tiles in flight. A tile is loaded
    through its block ids, so the pipeline needs two additional stages per tile in flight. A cache in fp8 is widened in
    registers, which takes more of them: more warps or a smaller tile.
    """
    least_rows = max(16, triton.next_power_of_2(group))
    num_rows = triton.next_power_of_2(max_query_len * group)
    row_bytes = element_bytes * triton.next_power_of_2(head_size)
    if element_bytes == 4:
        return AttentionConfig(max(least_rows, min(num_rows, 32)), tile=16, num_warps=8, num_stages=2)
    tile = 64 if row_bytes <= 256 else 32
    if num_rows <= 32:
        return AttentionConfig(max(least_rows, num_rows), tile, num_warps=4, num_stages=5)
    if is_fp8 and row_bytes > 256:
        return AttentionConfig(max(least_rows, 64), tile=16, num_warps=8, num_stages=3)
    if num_rows <= 64:
        return AttentionConfig(
            max(least_rows, 64), tile, num_warps=4 if row_bytes <= 256 and not is_fp8 else 8, num_stages=3
        )
    return AttentionConfig(max(least_rows, 128), tile, num_warps=8, num_stages=3)


def launch_key(*, element_bytes: int, head_size: int, group: int, max_query_len: int, is_fp8: bool = False) -> str:
    """Return the table key of a configuration: the phase counts only by rows per sequence, up to a large block."""
    num_rows = min(triton.next_power_of_2(max_query_len * group), 128)
    return key_of(bytes=element_bytes, head=head_size, group=group, rows=num_rows, fp8=int(is_fp8))


def chosen_config(query: Tensor, kv_cache: KVCache, group: int, max_query_len: int) -> AttentionConfig:
    """Return the configuration measured on this GPU for such a launch, or the rules' choice."""
    kind = {
        "element_bytes": query.element_size(),
        "head_size": kv_cache.head_size,
        "group": group,
        "max_query_len": max_query_len,
        "is_fp8": kv_cache.is_fp8,
    }
    return chosen(query.device, "paged_attention", launch_key(**kind), attention_config(**kind))


def invariant_config(*, element_bytes: int, head_size: int, group: int, is_fp8: bool) -> AttentionConfig:
    """Choose the tiling of the kernel in `invariant`, for decodes and prompts alike.

    64 rows are what the matrix unit of sm_90 takes at once; with heads of 256, they would not fit the registers. Four
    warps exchange nothing within a tile, and two such programs fit a processor: one computes while the other waits. No
    configuration is measured: another tiling may change bits, and a worker may continue another's jobs.
    """
    least_rows = max(16, triton.next_power_of_2(group))
    row_bytes = element_bytes * triton.next_power_of_2(head_size)
    if element_bytes == 4:
        return AttentionConfig(max(least_rows, 32), tile=16, num_warps=8, num_stages=2)
    if row_bytes > 256:
        return AttentionConfig(max(least_rows, 32), tile=32, num_warps=8, num_stages=3)
    if is_fp8 or least_rows > 64:
        return AttentionConfig(max(least_rows, 64), tile=64, num_warps=8, num_stages=3)
    return AttentionConfig(64, tile=64 if row_bytes <= 128 else 32, num_warps=4, num_stages=4)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tiling of the launch for few new tokens. All but `programs_per_processor` determine the bits of the result."""

    tile: int
    """Keys per step of the inner loop."""

    num_warps: int
    num_stages: int
    programs_per_processor: int
    """Programs that run on a processor at a time; there are no more."""


def decode_rows(group: int) -> int:
    """Return the rows (tokens times heads of a group) of a program for few new tokens: 16, or more to hold a group."""
    return max(16, 1 << (group - 1).bit_length())


def max_decode_tokens(group: int) -> int:
    """Return the most new tokens of a sequence whose keys are split: those that fill 16 rows, or one."""
    return max(1, 16 // group)


def short_chunk_config(*, element_bytes: int, head_size: int, group: int, is_fp8: bool) -> AttentionConfig:
    """Choose the tiling for short chunks: the largest without spills, so that one program occupies a processor.

    One for all lengths: with fewer rows there would be more variants to compile, and what they save is hidden behind
    the reading of keys.
    """
    rows = 128 if head_size <= 128 and not is_fp8 else 64
    return attention_config(
        element_bytes=element_bytes,
        head_size=head_size,
        group=group,
        max_query_len=max(rows // group, 1),
        is_fp8=is_fp8,
    )


def decode_config(*, element_bytes: int, head_size: int, group: int, is_fp8: bool = False) -> DecodeConfig:
    """Choose the tiling for few new tokens from dtype, head size and heads per key-value head.

    One warp holds the sums of 16 rows of 128 dimensions in its registers, and eight such programs fit a processor. The
    ids of blocks are read two tiles before keys and values, those two tiles before their use: five stages. Tiles have
    at least 4 KiB of keys, so that enough bytes are on their way.
    """
    if element_bytes == 4:
        return DecodeConfig(tile=16, num_warps=8, num_stages=3, programs_per_processor=2)
    num_warps = decode_rows(group) // 16 * (1 if head_size <= 128 else 2)
    tile = 32 if is_fp8 or head_size <= 64 else 16
    return DecodeConfig(tile, num_warps, num_stages=5, programs_per_processor=max(1, 8 // num_warps))


def decode_key(*, element_bytes: int, head_size: int, group: int, is_fp8: bool = False) -> str:
    """Return the table key of a configuration for few new tokens."""
    return key_of(decode=1, bytes=element_bytes, head=head_size, group=group, fp8=int(is_fp8))


def chosen_decode_config(query: Tensor, kv_cache: KVCache, group: int) -> DecodeConfig:
    """Return the configuration measured on this GPU for few new tokens, or the rules' choice."""
    kind = {
        "element_bytes": query.element_size(),
        "head_size": kv_cache.head_size,
        "group": group,
        "is_fp8": kv_cache.is_fp8,
    }
    return chosen(query.device, "paged_attention", decode_key(**kind), decode_config(**kind))


@cache
def has_hopper_kernel(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU and this Triton the one that the kernel in `hopper` was measured with."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return triton.__version__.startswith("3.6.")
