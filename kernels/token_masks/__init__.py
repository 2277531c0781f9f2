"""Masks of rows of logits: bits of the tokens that may be drawn."""

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows

__all__ = ["apply_token_masks"]


def apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set the logits of banned tokens to -inf, in place.

    Args:
        logits: `[R, V]`, float32, float16 or bfloat16; rows may be strided.
        rows: `[M]` int64: the rows that have a mask, each at most once.
        masks: `[M, W]` int32 with W = ceil(V / 32), contiguous. Token t may be drawn if bit t % 32 of word t // 32 is
            set.
    """
    check(logits.dim() == 2, "logits must be [R, V]")
    check_rows("logits", logits)
    num_masks, vocab_size = rows.numel(), logits.shape[1]
    check(rows.dtype == torch.int64 and rows.is_contiguous(), "rows must be contiguous int64")
    check(masks.shape == (num_masks, -(-vocab_size // 32)), "masks must be [M, ceil(V / 32)]")
    check(masks.dtype == torch.int32 and masks.is_contiguous(), "masks must be contiguous int32")
    path = path_of("token_masks", logits)
    if path is Path.TRITON:
        from sluice.kernels.token_masks.kernel import apply_token_masks_triton as apply
    elif path is Path.TORCH:
        from sluice.kernels.token_masks.reference import apply_token_masks_reference as apply
    else:
        from sluice.kernels.token_masks.cpu import apply_token_masks_cpu as apply
    apply(logits, rows, masks)
