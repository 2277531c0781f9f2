"""Bring a folder's weights into a decoder: names as transformers writes them, products fused and packed."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch
from torch import Tensor

from engine.loader import Weights
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder, DecoderWeights, LayerWeights
from engine.models.rope_table import rope_table
from kernels.linear import Linear, pack_linear
from kernels.write_kv import HeadNorm


def load_decoder(
    config: DecoderConfig,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    max_tokens: int,
) -> Decoder:
    """Build a decoder for sequences up to `max_model_len` and steps up to `max_tokens` tokens.

    Raises:
        ModelFolderError: a tensor is missing, broken or of another shape.
    """
    reader = _Reader(weights, dtype, device)
    embedding = reader.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    parts = DecoderWeights(
        embedding=embedding,
        layers=tuple(_load_layer(config, reader, f"model.layers.{i}") for i in range(config.num_layers)),
        final_norm=reader.tensor("model.norm.weight", config.hidden_size),
        output=_load_output(config, reader, embedding),
        cos_sin=rope_table(config.rope, max_model_len).to(device),
    )
    return Decoder(config, parts, max_tokens)


class _Reader:
    """Tensors of a folder, in one dtype on one device."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.get(name, shape).to(device=self._device, dtype=self._dtype)

    def linear(self, prefix: str, names: dict[str, int], in_size: int, *, has_bias: bool) -> Linear:
        """One product of several matrices `[N_i, in_size]`, one under the other."""
        weights = [self.tensor(f"{prefix}.{name}.weight", size, in_size) for name, size in names.items()]
        biases = [self.tensor(f"{prefix}.{name}.bias", size) for name, size in names.items()] if has_bias else []
        return pack_linear(_stack(weights), _stack(biases) if has_bias else None)


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _load_layer(config: DecoderConfig, reader: _Reader, prefix: str) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    return LayerWeights(
        attention_norm=reader.tensor(f"{prefix}.input_layernorm.weight", hidden),
        qkv=reader.linear(attention, qkv, hidden, has_bias=config.has_qkv_bias),
        head_norm=_load_head_norm(config, reader, attention) if config.has_head_norm else None,
        attention_output=reader.linear(attention, {"o_proj": hidden}, query, has_bias=config.has_output_bias),
        mlp_norm=reader.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=reader.linear(mlp, gate_up, hidden, has_bias=config.has_mlp_bias),
        down=reader.linear(mlp, {"down_proj": hidden}, inner, has_bias=config.has_mlp_bias),
    )


def _load_head_norm(config: DecoderConfig, reader: _Reader, prefix: str) -> HeadNorm:
    return HeadNorm(
        reader.tensor(f"{prefix}.q_norm.weight", config.head_size),
        reader.tensor(f"{prefix}.k_norm.weight", config.head_size),
        config.rms_norm_eps,
    )


def _load_output(config: DecoderConfig, reader: _Reader, embedding: Tensor) -> Linear:
    if config.is_tied:
        return pack_linear(embedding)
    return pack_linear(reader.tensor("lm_head.weight", config.vocab_size, config.hidden_size))
