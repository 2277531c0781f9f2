# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Biases and penalties in one Triton launch instead of a dozen elementwise ones; each entry edits its own logit."""

import triton
import triton.language as tl
from torch import Tensor

from sluice.kernels.penalties import Penalties

BLOCK = 256


@triton.jit(do_not_specialize=["E"])
def _penalties_kernel(
    logits_ptr,  # [S, V] float32, changed
    rows_ptr,  # [E] int32
    token_ids_ptr,  # [E] int32
    bias_ptr,  # [E] float32; so are the four below
    repetition_ptr,
    counts_ptr,
    frequency_ptr,
    presence_ptr,
    E,
    logits_stride_row,
    BLOCK_E: tl.constexpr,
):
    """One program per block of entries."""
    entries = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)  # [BLOCK_E]
    inside = entries < E
    rows = tl.load(rows_ptr + entries, mask=inside, other=0).to(tl.int64)
    token_ids = tl.load(token_ids_ptr + entries, mask=inside, other=0).to(tl.int64)
    logits_ptrs = logits_ptr + rows * logits_stride_row + token_ids
    values = tl.load(logits_ptrs, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + entries, mask=inside, other=0.0)
    repetition = tl.load(repetition_ptr + entries, mask=inside, other=1.0)
    counts = tl.load(counts_ptr + entries, mask=inside, other=0.0)
    frequency = tl.load(frequency_ptr + entries, mask=inside, other=0.0)
    presence = tl.load(presence_ptr + entries, mask=inside, other=0.0)

    # Each step is rounded as on the CPU (so nothing is fused below), so that near ties resolve equally.
    values += bias
    values = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    values -= frequency * counts + tl.where(counts > 0, presence, 0.0)
    tl.store(logits_ptrs, values, mask=inside)


def apply_penalties_triton(logits: Tensor, penalties: Penalties) -> None:
    """Launch the kernel; see `sluice.kernels.penalties.apply_penalties`."""
    num_entries = penalties.rows.shape[0]
    if num_entries == 0:
        return
    _penalties_kernel[(triton.cdiv(num_entries, BLOCK),)](
        logits,
        penalties.rows,
        penalties.token_ids,
        penalties.bias,
        penalties.repetition,
        penalties.counts,
        penalties.frequency,
        penalties.presence,
        num_entries,
        logits.stride(0),
        BLOCK_E=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
