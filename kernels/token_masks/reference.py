"""Definition of masks: the bits of each word, with PyTorch's operators."""

import torch
from torch import Tensor


def apply_token_masks_reference(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """See `apply_token_masks`. Reads no tensor on the host."""
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = (masks[:, :, None] >> shifts) & 1  # [M, W, 32]
    banned = bits.flatten(1)[:, : logits.shape[1]] == 0  # [M, V]
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(banned, -torch.inf))
