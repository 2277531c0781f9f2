# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Paged attention in Triton: allocation of its cache, and the launcher, which chooses the kernels.

Queries of the heads that share a key-value head are rows of one product, and keys are walked in tiles of TILE tokens,
looked up in the block table, with an online softmax in float32 (Dao, FlashAttention-2, 2023). Sequences with few new
tokens are split over their keys (`decode`), in a mixed batch too: the bits of a decode's row do not depend on whether
prompts are computed in the same step. Of the others, those that could not occupy the device are (`short_chunks`), and
the rest are not (`prefill`, or `hopper`).

Nothing here reads a tensor on the host, so a launch can be captured in a CUDA graph.
"""

import torch

from sluice.kernels.chain import HOPPER_PREFILL, Path, path_of
from sluice.kernels.checks import check
from sluice.kernels.paged_attention.call import NO_KEYS, AttentionCall, Chunks
from sluice.kernels.paged_attention.config import (
    chosen_config,
    chosen_decode_config,
    has_hopper_kernel,
    max_decode_tokens,
    short_chunk_config,
)
from sluice.kernels.paged_attention.decode import attend_decodes, num_programs
from sluice.kernels.paged_attention.layout import KVCache, Layout
from sluice.kernels.paged_attention.narrow import FP8
from sluice.kernels.paged_attention.prefill import attend_chunks
from sluice.kernels.paged_attention.short_chunks import attend_short_chunks

SEGMENT_TOKENS = 64
"""Keys of the shortest segment of a decode: a multiple of every tile."""

SHORT_CHUNK_KEYS = 2049
"""Fewest keys that a short chunk sees: more than in the steps that are recorded at start, which need fewer kernels."""

SHORT_CHUNK_SEGMENT = 512
"""Keys of the shortest segment of a short chunk."""


def allocate_cuda(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Make one layer's cache of zeros, `[blocks, 2, G, block_size, D]` in memory, as `Layout.PLAIN` views.

    One head's keys of a block are contiguous, which is what one program reads; so is a whole block with keys and
    values, which is what a copy moves.
    """
    check(dtype != FP8 or head_size % 2 == 0, "head size {} must be even for fp8", head_size)
    memory = torch.zeros((num_blocks, 2, num_kv_heads, block_size, head_size), dtype=dtype, device=device)
    keys, values = memory.transpose(2, 3).unbind(dim=1)  # [blocks, block_size, G, D] each
    key_scales = value_scales = None
    if dtype == FP8:
        scales = torch.zeros((num_blocks, 2, num_kv_heads, block_size), dtype=torch.float32, device=device)
        key_scales, value_scales = scales.transpose(2, 3).unbind(dim=1)  # [blocks, block_size, G] each
    return KVCache(
        keys=keys,
        values=values,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layout=Layout.PLAIN,
        key_scales=key_scales,
        value_scales=value_scales,
    )


def paged_attention_triton(call: AttentionCall) -> None:
    """Launch the kernels: for decodes, for short chunks, for other chunks. Each sequence is computed by one of them.

    See `kernels.paged_attention.paged_attention`.
    """
    has_chunks = call.max_query_len > max_decode_tokens(call.group)
    if not has_chunks or call.num_sequences > 1:
        decode_config = chosen_decode_config(call.query, call.kv_cache, call.group)
        attend_decodes(call, decode_config, segment_tokens=SEGMENT_TOKENS, pads=not has_chunks)
    if has_chunks:
        _attend_chunks(call)


def _attend_chunks(call: AttentionCall) -> None:
    """Launch the kernels for sequences with more new tokens than a decode."""
    is_for_hopper = _is_for_hopper(call)
    config = short_chunk_config(
        element_bytes=call.query.element_size(),
        head_size=call.kv_cache.head_size,
        group=call.group,
        is_fp8=call.kv_cache.is_fp8,
    )
    processors = num_programs(call.query.device, 1)
    chunks = _chunks_of(call, config.block_rows, processors, is_for_hopper=is_for_hopper)
    if chunks.may_be_short(call):
        attend_short_chunks(call, config, chunks, num_programs=processors, min_segment_tokens=SHORT_CHUNK_SEGMENT)
    if is_for_hopper:
        # Not imported elsewhere: Gluon differs between versions of Triton.
        from sluice.kernels.paged_attention.hopper import attend_chunks_on_hopper

        attend_chunks_on_hopper(call, chunks)
    else:
        attend_chunks(call, chosen_config(call.query, call.kv_cache, call.group, call.max_query_len), chunks)


def _chunks_of(call: AttentionCall, block_rows: int, processors: int, *, is_for_hopper: bool) -> Chunks:
    """Return which sequences have chunks; the short ones, if the step has few new tokens beside those of decodes.

    Few: as many as there are rows of one block of queries on each processor. The kernel for Hopper takes 0.7 of the
    time of the others for the same products, so there are half as many.
    """
    most_tokens = max(processors // call.kv_cache.num_kv_heads, 1) * max(block_rows // call.group, 1)
    if is_for_hopper:
        most_tokens //= 2
    has_few = call.num_tokens - call.num_sequences <= most_tokens
    return Chunks(max_decode_tokens(call.group) + 1, SHORT_CHUNK_KEYS if has_few else NO_KEYS)


def _is_for_hopper(call: AttentionCall) -> bool:
    """Whether the kernel for Hopper computes the chunks of a call."""
    if not has_hopper_kernel(call.query.device) or path_of(HOPPER_PREFILL, call.query) is not Path.TRITON:
        return False
    from sluice.kernels.paged_attention.hopper import serves

    return serves(call)
