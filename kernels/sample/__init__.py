"""Sample the next token of each sequence: filter to a kept set, then take the Gumbel-max of its logits.

The noise comes from `sluice.kernels.philox`.

Kept set, in this order, of z = logit / temperature:

1. min-p: z >= z_max + log(min_p);
2. top-k: the first k in the total order (value descending, token id ascending);
3. top-p: of those, the shortest prefix in that order whose mass is at least p of theirs. Mass is counted in integers,
  floor(exp(z - z_max) * 2**30), so that no tiling, splitting or batch composition can change the set. At least one
  token is kept.

The token is the argmax of z + Gumbel noise over the kept set, the lowest id among equals. Greedy rows (temperature 0)
take the argmax of the logits, the lowest id among equals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows

__all__ = ["MAX_NOISE_SPAN", "SampleOptions", "draws_with", "sample"]

MAX_NOISE_SPAN = 26.01
"""A token further than this below the largest z cannot win with any noise, so its noise is not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Sampling options of each row: tensors `[S]`, contiguous, on the device of the logits."""

    temperature: Tensor
    """float32; 0 means greedy."""

    top_k: Tensor
    """int32; 0 keeps all."""

    top_p: Tensor
    """float32; 1 keeps all."""

    min_p: Tensor
    """float32; 0 keeps all."""

    seed: Tensor
    """int64: the bits of the unsigned 64-bit seed."""

    position: Tensor
    """int32: offset in the output of the token being sampled."""

    counter_2: Tensor
    """int64: choice and stream, from `sluice.kernels.philox.counter_2`."""

    has_filters: bool = True
    """Whether any row has top-k, top-p or min-p. If not, a GPU does not search for kept sets."""


def sample(logits: Tensor, options: SampleOptions, *, out: Tensor | None = None) -> Tensor:
    """Choose one token per row.

    Args:
        logits: `[S, V]`, float32, float16 or bfloat16; rows may be strided. Not changed.
        options: one entry per row.
        out: `[S]` int64; allocated if None.

    Returns:
        `out`: token ids, -1 for a row that has a NaN or +inf, or nothing above -inf.

    Raises:
        ValueError: shapes, dtypes or strides disagree.
    """
    check(logits.dim() == 2, "logits must be [S, V], got {}", logits.shape)
    check_rows("logits", logits)
    shape = logits.shape[:1]
    check(options.temperature.shape == shape, "options must be {}", shape)
    out = torch.empty(shape, dtype=torch.int64, device=logits.device) if out is None else out
    check(out.shape == shape and out.dtype == torch.int64, "out must be {} int64", shape)
    path = path_of("sample", logits)
    if path is Path.TRITON:
        from sluice.kernels.sample.kernel import sample_triton as draw
    elif path is Path.TORCH:
        from sluice.kernels.sample.plain import sample_torch as draw
    else:
        from sluice.kernels.sample.cpu import sample_cpu as draw
    draw(logits, options, out=out)
    return out


def draws_with(options: SampleOptions) -> Callable[[Tensor], Tensor]:
    """Prepare `sample` with the same options for many steps.

    `options.position` may be written between two calls. The result of a call is valid until the call after the next.
    """
    if options.temperature.is_cuda:
        return partial(sample, options=options)
    from sluice.kernels.sample.cpu import draws_with_cpu

    return draws_with_cpu(options) or partial(sample, options=options)
