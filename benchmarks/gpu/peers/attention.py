"""torch's attentions compared with ours, at the same inputs: part of section "peers" of `benchmarks gpu`."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any  # functions of torch whose arguments differ by version

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from benchmarks.gpu.checks.accuracy import Lengths, attend
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Call, Scale
from benchmarks.gpu.speed.kernels import plain_attention
from benchmarks.kernels.cases import AttentionInputs

Theirs = Callable[[], Tensor]
"""Attends: `[T, H, D]`."""

Make = Callable[[AttentionInputs, Tensor, Tensor], Theirs]
"""Takes inputs, and the keys and values of each sequence in order, `[K, G, D]` each."""

SHAPES: dict[str, Lengths] = {
    "decode, 32 x 2048": ([1] * 32, [2048] * 32),
    "decode, 32 x 8192": ([1] * 32, [8192] * 32),
    "prefill of 8192": ([8192], [8192]),
    "prefills, 16 of 512": ([512] * 16, [512] * 16),
    "chunk of 2048 after 30720": ([2048], [32_768]),
}
"""Name to query lengths and context lengths; the 8B shape."""

UNPREFIXED = ("prefill of 8192", "prefills, 16 of 512")
"""Shapes of prompts without a prefix."""

COMPILED = ("decode, 32 x 8192", "prefill of 8192")
"""Shapes that FlexAttention is compiled for, which takes as long as everything else."""


def attention_peers(scale: Scale, shapes: Mapping[str, Lengths], peer: str, make: Make) -> Iterator[Line]:
    """Yield a line for each shape. A peer that is missing or fails is reported; it is not our failure."""
    heads = (4, 2, 16) if scale.is_toy else (32, 8, 128)
    for shape, (query_lens, context_lens) in shapes.items():
        inputs = plain_attention(scale, query_lens, context_lens, heads)
        before = torch.cuda.current_stream() if scale.device.type == "cuda" else None
        try:
            yield compared(scale, f"{peer}, {shape}", inputs, make(inputs, *keys_and_values(inputs)))
        except Exception as error:  # noqa: BLE001 - any error of a peer becomes a line, and the others continue
            if before is not None:
                # A capture that cannot be ended leaves its stream current.
                torch.cuda.set_stream(before)
            yield Line(f"{peer}, {shape}", {"note": f"cannot: {first_words(error)}"})


def first_words(error: Exception) -> str:
    """Return the error's class, and the beginning of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def compared(scale: Scale, name: str, inputs: AttentionInputs, theirs: Theirs) -> Line:
    """Yield times of both; wrong if their results differ by more than roundings."""
    ours = attend(inputs).float()
    error = float((theirs().float() - ours).square().mean().sqrt() / ours.square().mean().sqrt())
    out = torch.empty_like(inputs.query)
    figures = both_us(scale, theirs, lambda: attend(inputs, out))
    # Both round weights and results to 8 bits: half a per cent.
    return Line(name, figures | {"differs by": error}, error < 0.02)


def both_us(scale: Scale, theirs: Call, ours: Call) -> dict[str, float | str]:
    """Return times of two equivalent calls."""
    their_us, our_us = scale.timer.device_us(theirs), scale.timer.device_us(ours)
    return {"us": their_us, "us of ours": our_us, "times ours": their_us / our_us}


def keys_and_values(inputs: AttentionInputs) -> Iterator[Tensor]:
    """Return keys and values of all sequences in order, contiguous: `[K, G, D]` each."""
    lens, block_size = inputs.context_lens.tolist(), inputs.kv_cache.block_size
    for cache in (inputs.kv_cache.keys, inputs.kv_cache.values):
        rows = zip(inputs.block_tables, lens, strict=True)
        yield torch.cat([cache[table[: -(-n // block_size)].long()].flatten(0, 1)[:n] for table, n in rows])


def varlen(inputs: AttentionInputs, keys: Tensor, values: Tensor) -> Theirs:
    """Return torch's attention over sequences of different lengths, with the arguments of this torch version."""
    from torch.nn.attention.varlen import varlen_attn

    attention: Any = varlen_attn
    known = inspect.signature(attention).parameters
    options: dict[str, object] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    else:
        group = inputs.query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    ends = pad(inputs.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
    lens = (inputs.max_query_len, inputs.max_context_len)
    return lambda: attention(inputs.query, keys, values, inputs.query_start_locs, ends, *lens, **options)


def flex(inputs: AttentionInputs, keys: Tensor, values: Tensor) -> Theirs:
    """Return FlexAttention, for equal sequences; compiled on a GPU, where it would not be one kernel otherwise."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attention: Any = torch.compile(flex_attention, dynamic=False) if keys.is_cuda else flex_attention
    query_len, context_len = inputs.max_query_len, inputs.max_context_len

    def is_seen(_sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + (context_len - query_len)

    mask = create_block_mask(is_seen, None, None, query_len, context_len, device=keys.device) if query_len > 1 else None
    query, keys, values = _apart(inputs, keys, values)
    return lambda: attention(query, keys, values, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(0, 1)


def cudnn(inputs: AttentionInputs, keys: Tensor, values: Tensor) -> Theirs:
    """Return cuDNN's attention on a GPU, for equal sequences without a prefix; torch's own choice elsewhere."""
    query, keys, values = _apart(inputs, keys, values)

    def attention() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if query.is_cuda else nullcontext():
            out = scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return attention


def _apart(inputs: AttentionInputs, keys: Tensor, values: Tensor) -> Iterator[Tensor]:
    """Yield queries, keys and values of equal sequences, `[S, heads, length, D]` each."""
    num_seqs = len(inputs.context_lens)
    for x in (inputs.query, keys, values):
        yield x.view(num_seqs, -1, *x.shape[1:]).transpose(1, 2).contiguous()
