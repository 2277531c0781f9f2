"""The decoder: embed, L blocks of attention and feed-forward, norm, project. One block serves every family.

Hot: no logging, no host reads of tensors, no work per sequence in Python.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sluice.engine.models.config import DecoderConfig
from sluice.kernels.adapters import RowPlaces
from sluice.kernels.adapters.products import AdaptedProducts
from sluice.kernels.decoder_step import NUM_ADAPTED, DecoderWeights, LayerWeights, StepInputs
from sluice.kernels.embedding import embed
from sluice.kernels.experts import Dense
from sluice.kernels.linear import Linear
from sluice.kernels.paged_attention import KVCache, Layout, paged_attention
from sluice.kernels.rms_norm import add_rms_norm, rms_norm
from sluice.kernels.soft_cap import soft_cap
from sluice.kernels.write_kv import HeadNorm, write_kv

if TYPE_CHECKING:
    from sluice.kernels.decoder_step.cpu import DecoderStep


class Workspace:
    """Buffers of one step, allocated once: a step of T tokens uses their first T rows."""

    def __init__(self, config: DecoderConfig, max_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        def rows(width: int) -> Tensor:
            return torch.empty(max_tokens, width, dtype=dtype, device=device)

        heads = (max_tokens, config.num_heads, config.head_size)
        self.residual = rows(config.hidden_size)
        self.normed = rows(config.hidden_size)
        self.query = torch.empty(heads, dtype=dtype, device=device)
        self.attended = torch.empty(heads, dtype=dtype, device=device)


class Decoder:
    """A model on a device. Its caches are passed in.

    Between steps it keeps buffers and, if a step is one native call, the tensors of the last one (see
    `DecoderStep.run`). No result depends on earlier steps.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, max_tokens: int) -> None:
        self.config = config
        self._weights = weights
        self._workspace = Workspace(config, max_tokens, weights.dtype, weights.device)
        self._step = _native_step(weights, max_tokens)
        self._adapters: AdaptedProducts | None = None

    @property
    def weights(self) -> DecoderWeights:
        """The model's weights."""
        return self._weights

    def use_adapters(self, adapters: AdaptedProducts) -> None:
        """Take the adapters that steps name, of `weights.adapted`."""
        self._adapters = adapters
        if self._step is not None:
            self._step.use_adapters(adapters)

    @property
    def has_native_step(self) -> bool:
        """Whether a step is one native call."""
        return self._step is not None

    def forward(self, tensors: StepInputs, caches: list[KVCache]) -> Tensor:
        """Compute every token of the step, writing keys and values; return logits `[R, V]` of `tensors.logit_rows`.

        The logits are valid until the next call.
        """
        # The native step reads only its own cache layout, which fp8 caches do not have.
        if self._step is not None and caches[0].layout is Layout.PACKED:
            return self._step.run(tensors, caches)
        return self.forward_by_operations(tensors, caches)

    def hidden(self, tensors: StepInputs, caches: list[KVCache]) -> Tensor:
        """Compute a step as `forward` does; return the hidden states `[R, M]` of `tensors.logit_rows`.

        They are normed, and valid until the next call. `project` makes logits of them.
        """
        if self._step is not None and caches[0].layout is Layout.PACKED:
            return self._step.run_hidden(tensors, caches)
        return self._hidden_by_operations(tensors, caches)

    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits `[R, V]` of hidden states `[R, M]`, those that `forward` has."""
        logits = self._weights.output(hidden)
        if self.config.logit_scale != 1:
            logits.mul_(self.config.logit_scale)
        return soft_cap(logits, cap=self.config.final_soft_cap) if self.config.final_soft_cap else logits

    def classify(self, hidden: Tensor) -> Tensor:
        """Return the scores `[R, C]` of the classes of hidden states `[R, M]`, in float32."""
        head = self._weights.head
        assert head is not None, "check that the model has classes first"
        return hidden.float() @ head.T

    def time_phases(self, tensors: StepInputs, caches: list[KVCache]) -> dict[str, float]:
        """Compute a native step; return the seconds of its phases, for measurements."""
        assert self._step is not None, "check has_native_step first"
        return self._step.time_phases(tensors, caches)

    def forward_by_operations(self, tensors: StepInputs, caches: list[KVCache]) -> Tensor:
        """Run `forward` one operation after another: the fallback without a native step, and its reference."""
        return self.project(self._hidden_by_operations(tensors, caches))

    def _hidden_by_operations(self, tensors: StepInputs, caches: list[KVCache]) -> Tensor:
        weights, config = self._weights, self.config
        options = config.norm_options
        num_tokens = tensors.input_ids.shape[0]
        residual = self._workspace.residual[:num_tokens]
        normed = self._workspace.normed[:num_tokens]
        embed(weights.embedding, tensors.input_ids, out=residual)
        if weights.embedding_scale != 1:
            residual.mul_(weights.embedding_scale)

        first_norm = weights.layers[0].attention_norm
        # What the next product reads: the normalised residual, or the residual itself.
        read = residual if first_norm is None else rms_norm(residual, first_norm, **options, out=normed)
        tables = tensors.tables
        adapters = None if tensors.adapters is None else tensors.adapters.tokens
        for index, layer in enumerate(weights.layers):
            slot_mapping, block_tables = tables[caches[index].table]
            qkv, attention_output, gated, down = self._products(index, layer)
            query = self._write_kv(layer, qkv(read, adapters), tensors.positions, slot_mapping, caches[index])
            attended = self._attend(layer, query, tensors, block_tables, caches[index])
            if index == len(weights.layers) - 1:
                # After attention, the last block is needed only for rows that sample a token.
                attended, residual = attended[tensors.logit_rows], residual[tensors.logit_rows]
                read = read[tensors.logit_rows] if config.is_parallel else read
                normed = normed[: attended.shape[0]]
                adapters = None if tensors.adapters is None else tensors.adapters.kept
            add_norm = partial(add_rms_norm, residual=residual, **options, out=normed)
            computed = attention_output(attended, adapters)
            total = add_norm(computed, weight=layer.mlp_norm, added_weight=layer.attention_post_norm)
            entering = read if config.is_parallel else total
            # A mixture has no adapters: those of an expert's products would be of few rows each.
            computed = (
                down(gated(entering, adapters), adapters)
                if isinstance(layer.feed_forward, Dense)
                else layer.feed_forward(entering)
            )
            read = add_norm(computed, weight=self._norm_after(index), added_weight=layer.mlp_post_norm)
        return read

    def _products(self, index: int, layer: LayerWeights) -> "list[Callable[[Tensor, RowPlaces | None], Tensor]]":
        """Return the products of a layer that adapters change, as functions of rows and their adapters."""
        if self._adapters is None:
            return [partial(_without_adapters, product) for product in layer.adapted]
        return [partial(self._adapters.multiply, index * NUM_ADAPTED + number) for number in range(NUM_ADAPTED)]

    def _write_kv(
        self, layer: LayerWeights, qkv: Tensor, positions: Tensor, slot_mapping: Tensor, cache: KVCache
    ) -> Tensor:
        """Write the keys and values of `qkv` `[T, (H + 2 * G) * D]`; return the queries `[T, H, D]`."""
        if layer.row_norm is not None:
            self._normalise_heads_together(qkv, layer.row_norm)
        return write_kv(
            qkv,
            positions,
            slot_mapping,
            layer.cos_sin,
            cache,
            head_norm=layer.head_norm,
            out=self._workspace.query[: qkv.shape[0]],
        )

    def _normalise_heads_together(self, qkv: Tensor, norm: HeadNorm) -> None:
        """Normalise the queries, and the keys, of each row of `qkv` in place."""
        num_queries, num_keys = norm.query_weight.shape[0], norm.key_weight.shape[0]
        query, key, _ = qkv.split([num_queries, num_keys, num_keys], dim=1)
        for heads, weight in ((query, norm.query_weight), (key, norm.key_weight)):
            rms_norm(heads, weight, eps=norm.eps, weight_offset=norm.weight_offset, out=heads)

    def _attend(
        self, layer: LayerWeights, query: Tensor, tensors: StepInputs, block_tables: Tensor, cache: KVCache
    ) -> Tensor:
        """Attend: queries `[T, H, D]` to `[T, H * D]`."""
        num_tokens = query.shape[0]
        attended = paged_attention(
            query,
            cache,
            block_tables,
            tensors.query_start_locs,
            tensors.context_lens,
            scale=self.config.attention_scale,
            max_query_len=tensors.max_query_len,
            max_context_len=tensors.max_context_len,
            sliding_window=layer.sliding_window,
            soft_cap=self.config.attention_soft_cap,
            sinks=layer.sinks,
            out=self._workspace.attended[:num_tokens],
        )
        return attended.view(num_tokens, -1)

    def _norm_after(self, index: int) -> Tensor | None:
        """Weight of the norm that follows a block."""
        layers = self._weights.layers
        return layers[index + 1].attention_norm if index + 1 < len(layers) else self._weights.final_norm


def _without_adapters(product: Linear | None, x: Tensor, rows: RowPlaces | None) -> Tensor:
    assert rows is None, "a step with adapters is of a model with adapters"
    assert product is not None, "experts are not multiplied here"
    return product(x)


def _native_step(weights: DecoderWeights, max_tokens: int) -> "DecoderStep | None":
    """Return the decoder as one native call per step, or None if it cannot run so."""
    if weights.device.type != "cpu":
        return None
    from sluice.kernels.decoder_step.cpu import DecoderStep, can_step

    if not can_step(weights):
        return None
    return DecoderStep(weights, max_tokens)
