"""Definition of sampling: a loop over rows, a full sort, noise for every token."""

import torch
from torch import Tensor

from sluice.kernels.philox.reference import gumbel_reference, random_words_reference
from sluice.kernels.sample import SampleOptions

_MASS_ONE = 2.0**30


def sample_reference(logits: Tensor, options: SampleOptions) -> Tensor:
    """Choose one token per row of `logits` `[S, V]`; -1 where a row has NaN or +inf, or nothing above -inf."""
    tokens = [_sample_row(row.float(), options, s) for s, row in enumerate(logits)]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _sample_row(row: Tensor, options: SampleOptions, s: int) -> int:
    best = row.max().item()
    if not -float("inf") < best < float("inf"):
        return -1
    temperature = options.temperature[s]
    if temperature == 0:
        return int((row == best).nonzero()[0])
    z = row / temperature
    order = kept_set_reference(
        z, top_k=int(options.top_k[s]), top_p=float(options.top_p[s]), min_p=float(options.min_p[s])
    )
    ids = order.sort().values
    words = random_words_reference(
        ids,
        seed=int(options.seed[s]) & 0xFFFFFFFFFFFFFFFF,
        position=int(options.position[s]),
        counter_2=int(options.counter_2[s]),
    )
    scores = z[ids] + gumbel_reference(words)
    return int(ids[(scores == scores.max()).nonzero()[0]])


def kept_set_reference(z: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Return token ids of the kept set of one row of scaled logits `z` `[V]`, in order of value, then id."""
    order = torch.sort(z, descending=True, stable=True).indices
    ordered = z[order]
    kept = ordered > -float("inf")
    if min_p > 0:
        kept &= ordered >= ordered[0] + torch.tensor(min_p, dtype=torch.float32).log()
    order, ordered = order[kept], ordered[kept]
    if top_k > 0:
        order, ordered = order[:top_k], ordered[:top_k]
    if top_p < 1:
        mass = (torch.exp(ordered - ordered[0]).double() * _MASS_ONE).floor().long()
        reached = mass.cumsum(0).double() >= top_p * float(mass.sum())
        order = order[: int(reached.nonzero()[0]) + 1]
    return order
