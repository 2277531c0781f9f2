"""flashinfer's paged attention compared with ours, if the package is installed: part of section "peers"."""

# torch's types are partial, and flashinfer may be absent.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import importlib.util
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.gpu.peers.attention import compared, first_words
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.speed.kernels import plain_attention
from benchmarks.kernels.cases import AttentionInputs

SHAPES: dict[str, tuple[list[int], list[int]]] = {
    "decode, 32 x 2048": ([1] * 32, [2048] * 32),
    "decode, 32 x 8192": ([1] * 32, [8192] * 32),
    "prefill of 8192": ([8192], [8192]),
    "prefills, 16 of 512": ([512] * 16, [512] * 16),
}
HEADS = (32, 8, 128)


class Wrapper(Protocol):
    """One of its attentions: planned for a batch, then run."""

    plan: Callable[..., None]

    def run(self, query: Tensor, cache: Tensor) -> Tensor:
        """Attend: `[T, H, D]`."""
        ...


class FlashInfer(Protocol):
    """The used part of the package, which may be absent."""

    BatchDecodeWithPagedKVCacheWrapper: Callable[..., Wrapper]
    BatchPrefillWithPagedKVCacheWrapper: Callable[..., Wrapper]


def flashinfer_lines(scale: Scale) -> Iterator[Line]:
    """Yield its lines, or one that says why there are none. Its first use may compile for minutes."""
    if importlib.util.find_spec("flashinfer") is None:
        yield Line("flashinfer", {"note": "not present: the package flashinfer"})
        return
    if scale.is_toy:
        yield Line("flashinfer", {"note": "not run: it needs a card"})
        return
    try:
        flashinfer = cast("FlashInfer", import_module("flashinfer"))
        workspace = torch.empty(2**28, dtype=torch.uint8, device=scale.device)
        for name, (query_lens, context_lens) in SHAPES.items():
            inputs = plain_attention(scale, query_lens, context_lens, HEADS)
            yield compared(scale, f"flashinfer, {name}", inputs, planned(flashinfer, workspace, inputs))
    except Exception as error:  # noqa: BLE001 - any error of a peer becomes a line, and ours continue
        yield Line("flashinfer", {"note": f"cannot: {first_words(error)}"})


def planned(flashinfer: FlashInfer, workspace: Tensor, inputs: AttentionInputs) -> Callable[[], Tensor]:
    """Return flashinfer's attention over the same blocks, planned."""
    cache, device = inputs.kv_cache, inputs.query.device
    # The documented form: [blocks, 2, G, block_size, D].
    memory = torch.stack([cache.keys.transpose(1, 2), cache.values.transpose(1, 2)], dim=1)
    lens, size = inputs.context_lens.cpu(), cache.block_size
    blocks = -(-lens // size)
    ends = pad(blocks.cumsum(0), (1, 0)).int()
    ids = torch.cat([row[:n] for row, n in zip(inputs.block_tables, blocks.tolist(), strict=True)])
    tables = (ends.to(device), ids, (lens - (blocks - 1) * size).int().to(device))
    kinds: dict[str, object] = {"q_data_type": inputs.query.dtype, "kv_data_type": inputs.query.dtype}
    if inputs.max_query_len == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*tables, *HEADS, size, **kinds)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(inputs.query_start_locs, *tables, *HEADS, size, causal=True, **kinds)
    return lambda: wrapper.run(inputs.query, memory)
