"""Load a folder's weights into a decoder: names as in transformers, products fused and packed."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.engine.errors import QuantizationUnavailable
from sluice.engine.models.config import DecoderConfig
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.folder import Weights
from sluice.engine.models.rope_table import rope_table
from sluice.engine.models.weight_copies import WeightCopier, copier_to
from sluice.kernels.decoder_step import DecoderWeights, LayerWeights
from sluice.kernels.linear import Linear, pack_gated_linear, pack_linear
from sluice.kernels.write_kv import HeadNorm


@dataclass(frozen=True, slots=True)
class WeightForm:
    """Form in which weights are kept."""

    dtype: torch.dtype
    device: torch.device
    is_int8: bool = False
    """Whether the weights of products are rounded to int8."""


def load_decoder(
    config: DecoderConfig,
    weights: Weights,
    *,
    form: WeightForm,
    max_model_len: int,
    max_tokens: int,
    copier: WeightCopier | None = None,
) -> Decoder:
    """Build a decoder for sequences up to `max_model_len` and steps up to `max_tokens` tokens.

    Args:
        config: of the same folder.
        weights: memory-mapped.
        form: how the weights are kept, and on which device.
        max_model_len: longest sequence.
        max_tokens: maximum tokens of a step.
        copier: copies the weights to the device; chosen by the device if not given.

    Raises:
        ModelFolderError: a tensor is missing, corrupt or of another shape.
        QuantizationUnavailable: weights cannot be kept in this form.
    """
    copier = copier or copier_to(form.device)
    reader = _Reader(weights, form, copier)
    embedding = reader.kept("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    global_angles = local_angles = rope_table(config.rope, max_model_len).to(form.device)
    if config.local_rope is not None:
        local_angles = rope_table(config.local_rope, max_model_len).to(form.device)
    model = DecoderWeights(
        shape=config,
        embedding=embedding,
        # transformers rounds the factor before it multiplies.
        embedding_scale=float(torch.tensor(config.embedding_scale, dtype=form.dtype)),
        layers=tuple(
            _load_layer(config, reader, index, angles=local_angles if window else global_angles)
            for index, window in enumerate(config.sliding_windows)
        ),
        final_norm=reader.kept("model.norm.weight", config.hidden_size),
        output=_load_output(config, reader, embedding),
    )
    if copier is not None:
        copier.finish()
    return Decoder(config, model, max_tokens)


class _Reader:
    """Tensors of a folder, in one form."""

    def __init__(self, weights: Weights, form: WeightForm, copier: WeightCopier | None) -> None:
        self._weights = weights
        self._form = form
        self._copier = copier

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._stack([name], [shape])

    def kept(self, name: str, *shape: int) -> Tensor:
        """Return a copy of a tensor: a view of the mapped file would keep all of it in memory."""
        tensor = self.tensor(name, *shape)
        return tensor.clone() if self._copier is None else tensor

    def linear(self, prefix: str, names: dict[str, int], in_size: int, *, has_bias: bool) -> Linear:
        """Build one product of several matrices `[N_i, in_size]`, stacked."""
        return self.packed(*self._stacked(prefix, names, in_size, has_bias=has_bias))

    def packed(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Build the product of one matrix, in the form of the weights."""
        with _as_unavailable():
            return pack_linear(weight, bias, is_int8=self._form.is_int8)

    def gated_linear(self, prefix: str, names: dict[str, int], in_size: int, config: DecoderConfig) -> Linear:
        """Build the fused product of a gate and the projection that it gates."""
        stacked = self._stacked(prefix, names, in_size, has_bias=config.has_mlp_bias)
        with _as_unavailable():
            return pack_gated_linear(*stacked, activation=config.activation, is_int8=self._form.is_int8)

    def _stacked(
        self, prefix: str, names: dict[str, int], in_size: int, *, has_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        weight = self._stack([f"{prefix}.{name}.weight" for name in names], [(n, in_size) for n in names.values()])
        if not has_bias:
            return weight, None
        return weight, self._stack([f"{prefix}.{name}.bias" for name in names], [(size,) for size in names.values()])

    def _stack(self, names: list[str], shapes: list[tuple[int, ...]]) -> Tensor:
        """Stack tensors; with a copier each is copied to its place on the device, else a single one is not copied."""
        form = self._form
        if self._copier is None:
            parts = [
                self._weights.get(name, shape).to(form.device, form.dtype)
                for name, shape in zip(names, shapes, strict=True)
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        rows = [shape[0] for shape in shapes]
        out = torch.empty((sum(rows), *shapes[0][1:]), dtype=form.dtype, device=form.device)
        for name, shape, place in zip(names, shapes, out.split(rows), strict=True):
            self._copier.copy(self._weights.get(name, shape), place)
        return out


@contextmanager
def _as_unavailable() -> Generator[None]:
    try:
        yield
    except ValueError as error:
        raise QuantizationUnavailable(f"{error}.") from error


def _load_layer(config: DecoderConfig, reader: _Reader, index: int, *, angles: Tensor) -> LayerWeights:
    prefix = f"model.layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    # One name is the norm before the feed-forward, the other the norm after attention.
    after, before = "post_attention_layernorm", "pre_feedforward_layernorm"
    return LayerWeights(
        attention_norm=reader.kept(f"{prefix}.input_layernorm.weight", hidden),
        cos_sin=angles,
        qkv=reader.linear(attention, qkv, hidden, has_bias=config.has_qkv_bias),
        head_norm=_load_head_norm(config, reader, attention) if config.has_head_norm else None,
        attention_output=reader.linear(attention, {"o_proj": hidden}, query, has_bias=config.has_output_bias),
        attention_post_norm=reader.kept(f"{prefix}.{after}.weight", hidden) if config.has_post_norms else None,
        mlp_norm=reader.kept(f"{prefix}.{before if config.has_post_norms else after}.weight", hidden),
        gated=reader.gated_linear(mlp, gate_up, hidden, config),
        down=reader.linear(mlp, {"down_proj": hidden}, inner, has_bias=config.has_mlp_bias),
        mlp_post_norm=(
            reader.kept(f"{prefix}.post_feedforward_layernorm.weight", hidden) if config.has_post_norms else None
        ),
        sliding_window=config.sliding_windows[index],
    )


def _load_head_norm(config: DecoderConfig, reader: _Reader, prefix: str) -> HeadNorm:
    return HeadNorm(
        reader.kept(f"{prefix}.q_norm.weight", config.head_size),
        reader.kept(f"{prefix}.k_norm.weight", config.head_size),
        config.rms_norm_eps,
        config.norm_offset,
    )


def _load_output(config: DecoderConfig, reader: _Reader, embedding: Tensor) -> Linear:
    if config.is_tied:
        return reader.packed(embedding)
    return reader.packed(reader.tensor("lm_head.weight", config.vocab_size, config.hidden_size))
