"""A whole decoder step in one native call: all operations of all layers without returning to Python.

Its definition is `forward` in engine/models/decoder.py, operation by operation, which is also the fallback. Tokens are
bitwise identical where both multiply with kernels/linear/native.py. The weights' types are defined here since both use
them, and kernels do not import the engine.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.kernels.adapters import RowPlaces
from sluice.kernels.decoder_shape import DecoderShape
from sluice.kernels.embedding import Embedding
from sluice.kernels.experts import Dense, Mixture
from sluice.kernels.linear import Linear
from sluice.kernels.write_kv import HeadNorm

__all__ = ["DecoderWeights", "LayerWeights", "StepAdapters", "StepInputs"]

NUM_ADAPTED = 4
"""Products of a layer that adapters change: see `LayerWeights.adapted`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Prepared weights of one block."""

    attention_norm: Tensor | None
    """`[M]`; None if attention reads the residual as it is."""

    qkv: Linear
    """M to (H + 2 * G) * D."""

    head_norm: HeadNorm | None
    """None if heads are not normalised."""

    row_norm: HeadNorm | None
    """Norm of all query heads together, `[H * D]`, and of all key heads, `[G * D]`; None if there is none."""

    cos_sin: Tensor
    """`[positions, R]` float32."""

    attention_output: Linear
    """H * D to M."""

    attention_post_norm: Tensor | None
    """`[M]`, norm of the attention's output before it is added to the residual; None if there is none."""

    mlp_norm: Tensor | None
    """`[M]`; None if the feed-forward reads the residual as it is, or what attention has read (`is_parallel`)."""

    feed_forward: Dense | Mixture
    mlp_post_norm: Tensor | None
    """Like `attention_post_norm`, for the feed-forward; both are set or neither."""

    sliding_window: int
    """Sliding window in tokens, including the token itself; 0: all tokens before it."""

    sinks: Tensor | None = None
    """`[H]` float32: logits of the softmax that have no value; None if there are none."""

    @property
    def adapted(self) -> tuple[Linear | None, ...]:
        """The products that adapters change: what they add has this order. None in the place of those of experts."""
        feed_forward = self.feed_forward
        products = (feed_forward.gated, feed_forward.down) if isinstance(feed_forward, Dense) else (None, None)
        return (self.qkv, self.attention_output, *products)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """Prepared weights of a decoder."""

    shape: DecoderShape
    embedding_scale: float
    """In the dtype of the model."""

    embedding: Embedding
    """`[V, M]`."""

    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    output: Linear
    """M to V."""

    head: Tensor | None = None
    """`[C, M]` float32: of a model that classifies."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows between products."""
        return self.final_norm.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.final_norm.device

    @property
    def products(self) -> list[Linear]:
        """All products, in the order of a step."""
        blocks = ((layer.qkv, layer.attention_output, *layer.feed_forward.products) for layer in self.layers)
        return [product for block in blocks for product in block] + [self.output]

    @property
    def adapted(self) -> list[Linear | None]:
        """Those that adapters change, `NUM_ADAPTED` of each layer."""
        return [product for layer in self.layers for product in layer.adapted]


class StepAdapters(NamedTuple):
    """The adapters of a step's rows."""

    tokens: RowPlaces
    """Of all T tokens."""

    kept: RowPlaces
    """Of the R tokens of `logit_rows`."""


class StepInputs(NamedTuple):
    """One step: T tokens of S sequences, R of which sample a token. The next layout may reuse the memory."""

    input_ids: Tensor
    """`[T]` int64."""

    positions: Tensor
    """`[T]` int64."""

    slot_mapping: Tensor
    """`[T]` int64: slot that each token's key and value are written to."""

    block_tables: Tensor
    """`[S, max_blocks]` int32."""

    query_start_locs: Tensor
    """`[S + 1]` int32."""

    context_lens: Tensor
    """`[S]` int32: context lengths including this step's tokens."""

    logit_rows: Tensor
    """`[R]` int64: rows of T whose logits or hidden states are needed, in ascending order; those of padding last."""

    window_slots: Tensor | None
    """`[W, T]` int64: slot mappings of layers whose `KVCache.table` is 1 to W; None if there are none."""

    window_tables: Tensor | None
    """`[W, S, max_blocks]` int32: their block tables."""

    max_query_len: int
    max_context_len: int
    adapters: StepAdapters | None = None
    """None if no token has an adapter."""

    @property
    def tables(self) -> list[tuple[Tensor, Tensor]]:
        """The slot mapping and the block tables of layers, by `KVCache.table`."""
        tables = [(self.slot_mapping, self.block_tables)]
        if self.window_slots is not None and self.window_tables is not None:
            tables += zip(self.window_slots.unbind(), self.window_tables.unbind(), strict=True)
        return tables
