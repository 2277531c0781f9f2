"""Penalties on tokens that a sequence has seen, on whole rows of logits; the counts of its tokens are on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows

__all__ = ["Penalties", "apply_penalties"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of E rows of logits: contiguous tensors on their device."""

    seen: Tensor
    """`[P, V]` int32: the tokens of P sequences. 2 for each occurrence in the output, plus 1 if the prompt has it."""

    places: Tensor
    """`[E]` int32: each row's sequence in `seen`; -1 for a row without penalties."""

    extras: Tensor
    """`[E, K]` int32: tokens of each row's output that `seen` lacks; -1 for none."""

    repetition: Tensor
    """`[E]` float32: positive logits are divided by it, negative ones multiplied (Keskar et al., 2019)."""

    frequency: Tensor
    """`[E]` float32: subtracted once per occurrence in the output."""

    presence: Tensor
    """`[E]` float32: subtracted if the output has the token."""

    listed: tuple[Tensor, Tensor] | None = None
    """On the CPU, the tokens of each sequence that `seen` counts: `[P, V]` int32, of which the first `[P]` int32 are
    defined, each token once. Few are seen of many, so that these are read faster."""


def apply_penalties(logits: Tensor, penalties: Penalties) -> None:
    """Change the logits of seen tokens in place: repetition first, then frequency and presence.

    Args:
        logits: `[E, V]` float32; rows may be strided.
        penalties: of these rows.
    """
    check(logits.dim() == 2 and logits.dtype == torch.float32, "logits must be [E, V] float32")
    check_rows("logits", logits)
    num_rows, vocab_size = logits.shape
    check(penalties.seen.shape[1:] == (vocab_size,), "seen must be [P, {}]", vocab_size)
    check(penalties.places.shape == (num_rows,), "places must be [{}]", num_rows)
    check(penalties.extras.shape[:1] == (num_rows,), "extras must be [{}, K]", num_rows)
    if penalties.listed is not None:
        listed, lengths = penalties.listed
        check(listed.shape == penalties.seen.shape, "listed must be {}", penalties.seen.shape)
        check(lengths.shape == listed.shape[:1], "lengths must be [{}]", listed.shape[0])
    path = path_of("penalties", logits)
    if path is Path.TRITON:
        from sluice.kernels.penalties.kernel import apply_penalties_triton as apply
    elif path is Path.TORCH:
        from sluice.kernels.penalties.cpu import apply_penalties_torch as apply
    else:
        from sluice.kernels.penalties.cpu import apply_penalties_cpu as apply
    apply(logits, penalties)
