"""Penalties on the CPU: native.c, or torch operators without the library."""

import torch
from torch import Tensor

from sluice.kernels.native import native_function
from sluice.kernels.penalties import Penalties

SIGNATURE = ("sluice_penalties", "plpppppllppplli")


def apply_penalties_cpu(logits: Tensor, penalties: Penalties) -> None:
    """Apply the penalties; see `sluice.kernels.penalties.apply_penalties`."""
    native = native_function(*SIGNATURE)
    if native is None:
        apply_penalties_torch(logits, penalties)
        return
    num_rows, vocab_size = logits.shape
    listed, lengths = [x.data_ptr() for x in penalties.listed] if penalties.listed is not None else (0, 0)
    native(
        logits.data_ptr(),
        logits.stride(0),
        penalties.seen.data_ptr(),
        listed,
        lengths,
        penalties.places.data_ptr(),
        penalties.extras.data_ptr(),
        penalties.extras.shape[1],
        penalties.seen.stride(0),
        penalties.repetition.data_ptr(),
        penalties.frequency.data_ptr(),
        penalties.presence.data_ptr(),
        num_rows,
        vocab_size,
        torch.get_num_threads(),
    )


def apply_penalties_torch(logits: Tensor, penalties: Penalties) -> None:
    """Compute `apply_penalties_cpu` with torch operators, on any device, without reading a tensor on the host."""
    has_penalties = (penalties.places >= 0)[:, None]  # [E, 1]
    seen = penalties.seen.index_select(0, penalties.places.clamp(min=0))  # [E, V]
    extras = penalties.extras.long()
    seen.scatter_add_(1, extras.clamp(min=0), 2 * (extras >= 0).int())
    counts = (seen >> 1).float()
    repetition, frequency = penalties.repetition[:, None], penalties.frequency[:, None]
    values = torch.where(logits > 0, logits / repetition, logits * repetition)
    values -= frequency * counts + torch.where(counts > 0, penalties.presence[:, None], 0.0)
    logits.copy_(torch.where(has_penalties & (seen != 0), values, logits))
