"""Definition of masks: the bits of each word, with PyTorch's operators."""

import torch
from torch import Tensor


def apply_token_masks_torch(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """See `apply_token_masks`."""
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = (masks[:, :, None] >> shifts) & 1  # [M, W, 32]
    banned = bits.flatten(1)[:, : logits.shape[1]] == 0  # [M, V]
    if len(rows) == len(logits):
        # All of them: their order is that of the rows.
        logits.masked_fill_(banned, -torch.inf)
    else:
        logits[rows] = logits.index_select(0, rows).masked_fill_(banned, -torch.inf)
