"""Masks on the CPU."""

import numpy as np
import torch
from torch import Tensor


def apply_token_masks_cpu(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """See `apply_token_masks`."""
    banned_bits = np.unpackbits((~masks).numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    banned = torch.from_numpy(banned_bits.view(np.bool_))  # [M, V]
    for row, tokens in zip(rows.tolist(), banned, strict=True):
        logits[row].masked_fill_(tokens, -torch.inf)
