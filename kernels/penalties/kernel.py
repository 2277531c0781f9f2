# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Penalties in one Triton launch instead of a dozen operators over whole rows."""

import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.penalties import Penalties

BLOCK = 1024


@triton.jit(do_not_specialize=["V", "K"])
def _penalties_kernel(
    logits_ptr,  # [E, V] float32, changed
    seen_ptr,  # [P, V] int32
    places_ptr,  # [E] int32
    extras_ptr,  # [E, K] int32
    repetition_ptr,  # [E] float32; so are the two below
    frequency_ptr,
    presence_ptr,
    V,
    K,
    logits_stride_row,
    seen_stride_place,
    BLOCK_V: tl.constexpr,
):
    """One program per row and block of tokens."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + row).to(tl.int64)
    if place < 0:
        return
    token_ids = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    seen = tl.load(seen_ptr + place * seen_stride_place + token_ids, mask=token_ids < V, other=0)
    for k in range(K):
        extra = tl.load(extras_ptr + row * K + k)
        seen += tl.where(token_ids == extra, 2, 0)
    is_seen = (seen != 0) & (token_ids < V)
    logits_ptrs = logits_ptr + row * logits_stride_row + token_ids
    values = tl.load(logits_ptrs, mask=is_seen, other=0.0)
    repetition = tl.load(repetition_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    counts = (seen >> 1).to(tl.float32)

    # Each step is rounded as on the CPU (so nothing is fused below), so that near ties resolve equally.
    values = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    values -= frequency * counts + tl.where(counts > 0, presence, 0.0)
    tl.store(logits_ptrs, values, mask=is_seen)


def apply_penalties_triton(logits: Tensor, penalties: Penalties) -> None:
    """Launch the kernel; see `sluice.kernels.penalties.apply_penalties`."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    _penalties_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
        logits,
        penalties.seen,
        penalties.places,
        penalties.extras,
        penalties.repetition,
        penalties.frequency,
        penalties.presence,
        vocab_size,
        penalties.extras.shape[1],
        logits.stride(0),
        penalties.seen.stride(0),
        BLOCK_V=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
