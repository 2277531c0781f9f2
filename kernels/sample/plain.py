"""Sampling with torch's operators: whole rows sorted, a few at a time. For a GPU whose kernel does not work."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from sluice.kernels.philox import NOISE_VERSION
from sluice.kernels.philox.reference import gumbel_reference, philox4x32_reference
from sluice.kernels.sample import SampleOptions

_MASS_ONE = 2.0**30
_WORD = 0xFFFFFFFF
_CHUNK_LOGITS = 2**22
"""Logits of the rows that are sampled at once: noise takes a few hundred bytes for each."""


def sample_torch(logits: Tensor, options: SampleOptions, *, out: Tensor) -> None:
    """Write one token per row of `logits` `[S, V]` to `out` `[S]`; no tensor is read on the host."""
    num_rows = max(1, _CHUNK_LOGITS // logits.shape[1])
    for first in range(0, logits.shape[0], num_rows):
        rows = slice(first, first + num_rows)
        tensors = {field.name: getattr(options, field.name) for field in fields(options) if field.type is Tensor}
        some = replace(options, **{name: tensor[rows] for name, tensor in tensors.items()})
        out[rows] = _sampled(logits[rows].float(), some)


def _sampled(logits: Tensor, options: SampleOptions) -> Tensor:
    best = logits.amax(dim=-1)
    is_drawn = options.temperature > 0
    z = logits / torch.where(is_drawn, options.temperature, 1.0)[:, None]
    # A row with a NaN fails below; here it must only not disturb the sort.
    kept = _kept(torch.nan_to_num(z, nan=-float("inf"), posinf=float("inf"), neginf=-float("inf")), options)
    scores = torch.where(kept, z + _noise(logits.shape[1], options), -float("inf"))
    # The first of equals, as torch promises.
    token_ids = torch.where(is_drawn[:, None], scores, logits).argmax(dim=-1)
    return torch.where((best > -float("inf")) & (best < float("inf")), token_ids, -1)


def _kept(z: Tensor, options: SampleOptions) -> Tensor:
    """Return which tokens of each row are in its kept set, `[S, V]`."""
    ordered, order = torch.sort(z, dim=-1, descending=True, stable=True)
    kept = ordered > -float("inf")
    # The logarithm of 0 keeps all.
    kept &= ordered >= ordered[:, :1] + options.min_p.log()[:, None]
    ranks = torch.arange(z.shape[1], device=z.device)
    kept &= (ranks < options.top_k[:, None]) | (options.top_k[:, None] <= 0)
    mass = (torch.exp(ordered - ordered[:, :1]).double() * _MASS_ONE).floor().long()
    mass = torch.where(kept, mass, 0)
    kept_mass = options.top_p.double()[:, None] * mass.sum(dim=-1, keepdim=True).double()
    # A token is kept while those before it have not reached the mass.
    before = (mass.cumsum(dim=-1) - mass).double()
    kept &= (before < kept_mass) | (options.top_p[:, None] >= 1) | (ranks == 0)
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _noise(vocab_size: int, options: SampleOptions) -> Tensor:
    """Return the Gumbel noise of every token, `[S, V]`."""
    token_ids = torch.arange(vocab_size, device=options.seed.device)[None, :]
    c1, c2 = options.position.long()[:, None], options.counter_2.long()[:, None]
    c3 = torch.full_like(c1, NOISE_VERSION)
    key = (options.seed[:, None] & _WORD, (options.seed[:, None] >> 32) & _WORD)
    words = torch.stack(philox4x32_reference((token_ids >> 2, c1, c2, c3), key))  # [4, S, V]
    lanes = (token_ids & 3).expand(words.shape[1:])
    return gumbel_reference(words.gather(0, lanes[None]).squeeze(0))
