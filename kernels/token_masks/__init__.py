"""Masks of rows of logits: bits of the tokens that may be drawn."""

import torch
from torch import Tensor

from sluice.kernels.checks import check, check_rows

__all__ = ["apply_token_masks"]


def apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set the logits of banned tokens to -inf, in place.

    Args:
        logits: `[E, V]` float32; rows may be strided.
        rows: `[M]` int64: the rows that have a mask, each at most once.
        masks: `[M, W]` int32 with W = ceil(V / 32), contiguous. Token t may be drawn if bit t % 32 of word t // 32 is
            set.
    """
    check(logits.dim() == 2 and logits.dtype == torch.float32, "logits must be [E, V] float32")
    check_rows("logits", logits)
    num_masks, vocab_size = rows.numel(), logits.shape[1]
    check(masks.shape == (num_masks, -(-vocab_size // 32)), "masks must be [M, ceil(V / 32)]")
    check(masks.dtype == torch.int32 and masks.is_contiguous(), "masks must be contiguous int32")
    if logits.device.type == "cpu":
        from sluice.kernels.token_masks.cpu import apply_token_masks_cpu as apply
    else:
        from sluice.kernels.token_masks.reference import apply_token_masks_torch as apply
    apply(logits, rows, masks)
