"""The decoder: embed, L blocks of attention and feed-forward, norm, project. One block serves every family.

Hot: no logging, no host reads of tensors, no work per sequence in Python.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.batch_tensors import BatchTensors
from engine.models.config import DecoderConfig
from kernels.decoder_step import StepInputs, StepLayer, StepModel
from kernels.linear import Linear
from kernels.paged_attention import KVCache, Layout, paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.write_kv import HeadNorm, write_kv

if TYPE_CHECKING:
    from kernels.decoder_step.cpu import DecoderStep


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One block's weights, ready to be used."""

    attention_norm: Tensor
    """`[M]`."""

    qkv: Linear
    """M to (H + 2 * G) * D."""

    head_norm: HeadNorm | None
    attention_output: Linear
    """H * D to M."""

    mlp_norm: Tensor
    gated: Linear
    """M to I, through the gate."""

    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A decoder's weights, ready to be used."""

    embedding: Tensor
    """`[V, M]`."""

    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    output: Linear
    """M to V."""

    cos_sin: Tensor
    """`[max_model_len, R]` float32."""


class Workspace:
    """Buffers of one step, made once: a step of T tokens uses their first T rows."""

    def __init__(self, config: DecoderConfig, max_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        def rows(width: int) -> Tensor:
            return torch.empty(max_tokens, width, dtype=dtype, device=device)

        heads = (max_tokens, config.num_heads, config.head_size)
        self.residual = rows(config.hidden_size)
        self.normed = rows(config.hidden_size)
        self.query = torch.empty(heads, dtype=dtype, device=device)
        self.attended = torch.empty(heads, dtype=dtype, device=device)


class Decoder:
    """A model on a device. Its caches are passed in; it keeps nothing from step to step."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, max_tokens: int) -> None:
        self.config = config
        self._weights = weights
        self._scale = config.head_size**-0.5
        self._workspace = Workspace(config, max_tokens, weights.embedding.dtype, weights.embedding.device)
        self._step = _native_step(config, weights, max_tokens)

    @property
    def weights(self) -> DecoderWeights:
        """What it computes with."""
        return self._weights

    @property
    def has_native_step(self) -> bool:
        """Whether a step is one native call."""
        return self._step is not None

    def forward(self, tensors: BatchTensors, caches: list[KVCache]) -> Tensor:
        """Compute every token of the step, writing keys and values; return logits `[R, V]` of `tensors.logit_rows`.

        They are valid until the next call.
        """
        # The native step reads its own layout alone: a cache in fp8 has none.
        if self._step is not None and caches[0].layout is Layout.PACKED:
            return self._step.run(_step_inputs(tensors), caches)
        return self.forward_by_operations(tensors, caches)

    def time_phases(self, tensors: BatchTensors, caches: list[KVCache]) -> dict[str, float]:
        """Compute a native step; return the seconds of its phases, for measurements."""
        assert self._step is not None, "has_native_step was asked"
        return self._step.time_phases(_step_inputs(tensors), caches)

    def forward_by_operations(self, tensors: BatchTensors, caches: list[KVCache]) -> Tensor:
        """`forward`, one operation after another: where no native step can be had, and to compare it with."""
        weights, eps = self._weights, self.config.rms_norm_eps
        num_tokens = tensors.input_ids.shape[0]
        residual = self._workspace.residual[:num_tokens]
        normed = self._workspace.normed[:num_tokens]
        torch.index_select(weights.embedding, 0, tensors.input_ids, out=residual)

        rms_norm(residual, weights.layers[0].attention_norm, eps=eps, out=normed)
        for index, layer in enumerate(weights.layers):
            attended = self._attend(index, layer, normed, tensors, caches[index])
            if index == len(weights.layers) - 1:
                # Past its attention, the last block matters only where a token is drawn.
                attended, residual = attended[tensors.logit_rows], residual[tensors.logit_rows]
                normed = normed[: attended.shape[0]]
            add_rms_norm(layer.attention_output(attended), residual, layer.mlp_norm, eps=eps, out=normed)
            add_rms_norm(layer.down(layer.gated(normed)), residual, self._norm_after(index), eps=eps, out=normed)
        return weights.output(normed)

    def _attend(self, index: int, layer: LayerWeights, normed: Tensor, tensors: BatchTensors, cache: KVCache) -> Tensor:
        """`[T, M]` to `[T, H * D]`."""
        num_tokens = normed.shape[0]
        query = write_kv(
            layer.qkv(normed),
            tensors.positions,
            tensors.slot_mapping,
            self._weights.cos_sin,
            cache,
            head_norm=layer.head_norm,
            out=self._workspace.query[:num_tokens],
        )
        attended = paged_attention(
            query,
            cache,
            tensors.block_tables,
            tensors.query_start_locs,
            tensors.context_lens,
            scale=self._scale,
            max_query_len=tensors.max_query_len,
            max_context_len=tensors.max_context_len,
            sliding_window=self.config.sliding_windows[index],
            out=self._workspace.attended[:num_tokens],
        )
        return attended.view(num_tokens, -1)

    def _norm_after(self, index: int) -> Tensor:
        """Weight of the norm that follows a block."""
        layers = self._weights.layers
        return layers[index + 1].attention_norm if index + 1 < len(layers) else self._weights.final_norm


def _native_step(config: DecoderConfig, weights: DecoderWeights, max_tokens: int) -> "DecoderStep | None":
    """The decoder as one native call a step, where all of its products are native."""
    if weights.embedding.device.type != "cpu":
        return None
    from kernels.decoder_step.cpu import DecoderStep, can_step

    products = [
        product for layer in weights.layers for product in (layer.qkv, layer.attention_output, layer.gated, layer.down)
    ]
    if not can_step([*products, weights.output], config.head_size):
        return None
    return DecoderStep(_step_model(config, weights), max_tokens)


def _step_model(config: DecoderConfig, weights: DecoderWeights) -> StepModel:
    return StepModel(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        rms_norm_eps=config.rms_norm_eps,
        activation=config.activation,
        embedding=weights.embedding,
        layers=[
            StepLayer(
                attention_norm=layer.attention_norm,
                qkv=layer.qkv,
                head_norm=layer.head_norm,
                attention_output=layer.attention_output,
                mlp_norm=layer.mlp_norm,
                gated=layer.gated,
                down=layer.down,
                sliding_window=window,
            )
            for layer, window in zip(weights.layers, config.sliding_windows, strict=True)
        ],
        final_norm=weights.final_norm,
        output=weights.output,
        cos_sin=weights.cos_sin,
    )


def _step_inputs(tensors: BatchTensors) -> StepInputs:
    return StepInputs(
        input_ids=tensors.input_ids,
        positions=tensors.positions,
        slot_mapping=tensors.slot_mapping,
        block_tables=tensors.block_tables,
        query_start_locs=tensors.query_start_locs,
        context_lens=tensors.context_lens,
        logit_rows=tensors.logit_rows,
    )
