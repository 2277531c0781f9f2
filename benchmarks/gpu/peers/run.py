"""Peers compared with ours, in the same run and at the same inputs: section "peers" of `benchmarks gpu`.

torch's attentions and operators here; engines in `engines`, flashinfer in `flashinfer`. A peer that is missing or fails
gives a line that says so. Wrong only if one of torch's attentions differs from ours.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from benchmarks.gpu.peers.attention import COMPILED, SHAPES, UNPREFIXED, attention_peers, both_us, cudnn, flex, varlen
from benchmarks.gpu.peers.engines import engines
from benchmarks.gpu.peers.flashinfer import flashinfer_lines
from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from benchmarks.kernels.cases import make_options
from sluice.kernels.rms_norm.kernel import rms_norm_triton
from sluice.kernels.sample.kernel import sample_triton


def groups(scale: Scale) -> Groups:
    """Return quick groups first; those that compile or may fail last."""
    toy = {"toy prefill": ([16], [16])}
    shapes, unprefixed, flexible = (
        toy if scale.is_toy else {name: SHAPES[name] for name in names} for names in (SHAPES, UNPREFIXED, COMPILED)
    )
    return {
        "varlen_attn": lambda: attention_peers(scale, shapes, "varlen_attn", varlen),
        "cuDNN": lambda: attention_peers(scale, unprefixed, "cuDNN", cudnn),
        "norms": lambda: _norms(scale),
        "sampling": lambda: _draws(scale),
        "engines": lambda: engines(scale),
        "flashinfer": lambda: flashinfer_lines(scale),
        "flex_attention": lambda: attention_peers(scale, flexible, "flex_attention", flex),
    }


# Operators


def _random(scale: Scale, *shape: int) -> Tensor:
    return torch.randn(shape, device=scale.device).to(scale.dtype)


def _norms(scale: Scale) -> Iterator[Line]:
    size = 64 if scale.is_toy else 4096
    for num_tokens in scale.pick([256, 4096], [2]):
        x, weight = _random(scale, num_tokens, size), _random(scale, size)
        out = torch.empty_like(x)
        figures = both_us(
            scale,
            lambda x=x, weight=weight: torch_rms_norm(x, (size,), weight, 1e-6),
            lambda x=x, weight=weight, out=out: rms_norm_triton(x, weight, eps=1e-6, out=out),
        )
        yield Line(f"torch's rms_norm, {num_tokens} x {size}", figures)


def _draws(scale: Scale) -> Iterator[Line]:
    """Measure sampling by softmax, and by softmax over a sorted kept set, with torch operators."""
    vocab_size = 300 if scale.is_toy else 128_256
    ways: Sequence[tuple[str, Callable[[Tensor], Tensor], dict[str, float]]] = (
        ("softmax and draw", _draw, {"temperature": 0.8}),
        ("softmax, sort, top-p and draw", _draw_top_p, {"temperature": 0.8, "top_p": 0.9}),
    )
    for batch, (name, draw, options) in product(scale.pick([32, 256], [1]), ways):
        logits = _random(scale, batch, vocab_size) * 3
        rows, out = (
            make_options([options] * batch, scale.device),
            torch.empty(batch, dtype=torch.int64, device=scale.device),
        )
        figures = both_us(
            scale,
            lambda draw=draw, logits=logits: draw(logits),
            lambda logits=logits, rows=rows, out=out: sample_triton(logits, rows, out=out),
        )
        yield Line(f"torch's {name}, {batch} x {vocab_size}", figures)


def _draw(logits: Tensor) -> Tensor:
    """Sample a token of each row by its probability: the largest of probabilities over exponential noise."""
    weights = (logits.float() / 0.8).softmax(dim=-1)
    return (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1)


def _draw_top_p(logits: Tensor) -> Tensor:
    weights, order = (logits.float() / 0.8).softmax(dim=-1).sort(dim=-1, descending=True)
    weights = weights.masked_fill(weights.cumsum(dim=-1) - weights > 0.9, 0.0)
    drawn = (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1, keepdim=True)
    return order.gather(1, drawn)
