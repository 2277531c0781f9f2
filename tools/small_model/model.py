"""The decoder in the form that trains fastest on one CPU thread, with the parameter names of Hugging Face's Llama.

fp32 master weights, bf16 activations and products. Rows may hold several documents: a mask keeps them apart and
positions are given, so that each document sees itself as it will be at generation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional

from tools.small_model.tokenizer import MAX_LENGTH

LONGEST_DENSE_ATTENTION = 256
"""Rows up to this width use two batched products; wider ones torch's blocked attention, whose backward is slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model, in the shape letters V, M, L, H, G, D."""

    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


class Linear(nn.Linear):
    """A projection without bias that multiplies in the dtype of its input."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight.to(input.dtype))


class Norm(nn.Module):
    """RMS normalisation."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self._eps)
        return (normed * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotated halves."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = Linear(shape.hidden_size, shape.num_heads * shape.head_dim)
        self.k_proj = Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.v_proj = Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.num_heads * shape.head_dim, shape.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        group_size = self._shape.num_heads // self._shape.num_kv_heads
        query = _rotate(self._heads(self.q_proj(x)), cos, sin)
        key = _rotate(self._heads(self.k_proj(x)), cos, sin).repeat_interleave(group_size, 1)
        value = self._heads(self.v_proj(x)).repeat_interleave(group_size, 1)
        attended = _attend(query, key, value, mask)  # [B, H, T, D]
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._shape.head_dim)).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scale = query.shape[-1] ** -0.5
    if query.shape[2] > LONGEST_DENSE_ATTENTION:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = (query @ key.transpose(-1, -2)).float() * scale + mask
    return torch.softmax(scores, -1).to(value.dtype) @ value


class Mlp(nn.Module):
    """The gated feed-forward network (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each on a normalised input and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids to hidden states; the embedding also reads the logits out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, shape.norm_eps)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                depth_scale = (
                    (2 * self.shape.num_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                )
                nn.init.normal_(parameter, std=0.03 * depth_scale)

    def forward(self, token_ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return the hidden states `[B, T, M]` in bf16.

        Args:
            token_ids: `[B, T]`.
            positions: `[B, T]`.
            mask: `[B, 1, T, T]` bf16, 0 where attention is allowed and minus infinity elsewhere.
        """
        x = self.embed_tokens(token_ids).to(torch.bfloat16)
        cos, sin = self._rotation(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = self.shape.head_dim // 2
        frequencies = self.shape.rope_theta ** (-torch.arange(half) / half)
        angles = positions[:, None, :, None] * frequencies  # [B, 1, T, D/2]
        return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


def load_weights(decoder: Decoder, folder: Path) -> None:
    """Put the weights of a folder that `save_model` wrote into a decoder of the same shape."""
    weights = load((folder / "model.safetensors").read_bytes())
    decoder.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in weights.items()})


def save_model(decoder: Decoder, folder: Path, *, token_ids: dict[str, int]) -> None:
    """Write `model.safetensors` in bf16, `config.json` and `generation_config.json`.

    Args:
        decoder: the trained model.
        folder: where to write; it exists.
        token_ids: `bos_token_id`, `eos_token_id` and `pad_token_id`.
    """
    weights = {f"model.{name}": tensor.detach().to(torch.bfloat16) for name, tensor in decoder.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    _write_json(folder / "config.json", _llama_config(decoder.shape) | token_ids)
    _write_json(folder / "generation_config.json", {"do_sample": False, **token_ids})


def _llama_config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.03,
        "tie_word_embeddings": True,
        "use_cache": True,
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
