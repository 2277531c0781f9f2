# Triton's language is not typable: a launch takes options that no signature has, a constexpr is any value.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Masks of logits in one Triton launch that writes banned tokens alone, and reads no logit."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit(do_not_specialize=["V", "W"])
def _token_masks_kernel(
    logits_ptr,  # [R, V], changed
    rows_ptr,  # [M] int64
    masks_ptr,  # [M, W] int32
    V,
    W,
    logits_stride_row,
    BLOCK_V: tl.constexpr,
):
    """One program per mask and block of tokens."""
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + number)
    token_ids = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    inside = token_ids < V
    words = tl.load(masks_ptr + number * W + token_ids // 32, mask=inside, other=0)
    is_banned = inside & ((words >> (token_ids % 32)) & 1 == 0)
    banned = tl.full([BLOCK_V], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * logits_stride_row + token_ids, banned, mask=is_banned)


def apply_token_masks_triton(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Launch the kernel; see `sluice.kernels.token_masks.apply_token_masks`."""
    num_masks, num_words = masks.shape
    if num_masks == 0:
        return
    grid = (num_masks, triton.cdiv(logits.shape[1], BLOCK))
    _token_masks_kernel[grid](
        logits, rows, masks, logits.shape[1], num_words, logits.stride(0), BLOCK_V=BLOCK, num_warps=4
    )
