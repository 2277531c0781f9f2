"""What a decoder must know of itself, read from a Hugging Face config.json of any age.

A family is a row of `FAMILIES`: how its config differs from Llama's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from engine.errors import ModelFolderError
from kernels.gated_activation import Activation

Json = Mapping[str, object]
"""A parsed JSON object."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: its type and the numbers that it needs."""

    type: str
    theta: float
    rotary_size: int
    """Elements of a head that are rotated."""

    parameters: Json
    """What the config says beyond that (factor, low_freq_factor, short_factor ...)."""

    max_position_embeddings: int
    original_max_position_embeddings: int
    """Context of the pretraining, before the embedding was stretched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of one decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: Activation
    is_tied: bool
    """The output projection is the embedding."""

    has_qkv_bias: bool
    has_output_bias: bool
    """Bias on the attention's output projection."""

    has_mlp_bias: bool
    has_head_norm: bool
    """RMS norm of each query and key head before the rotation."""

    sliding_windows: tuple[int, ...]
    """One per layer: a token sees itself and this many less one before it. 0: all."""

    rope: RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one model_type differs: defaults that its configs leave out, and switches."""

    sliding_windows: Callable[[Json, int], tuple[int, ...]]
    has_qkv_bias: Callable[[Json], bool]
    has_output_bias: Callable[[Json], bool]
    has_head_norm: bool = False
    default_head_size: int | None = None
    """None: hidden size over heads."""


def _no_windows(_: Json, num_layers: int) -> tuple[int, ...]:
    return (0,) * num_layers


def _one_window(config: Json, num_layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window", 4096)
    return (_integer({"sliding_window": window or 0}, "sliding_window"),) * num_layers


def _layered_windows(config: Json, num_layers: int) -> tuple[int, ...]:
    """Qwen's rule: only if switched on; `layer_types` names the layers, else those from `max_window_layers`."""
    if not config.get("use_sliding_window", False):
        return (0,) * num_layers
    window = _integer({"sliding_window": config.get("sliding_window", 4096) or 0}, "sliding_window")
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        return tuple(window if kind == "sliding_attention" else 0 for kind in cast("list[object]", layer_types))
    first = _integer(config, "max_window_layers", 28)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _attention_bias(config: Json) -> bool:
    return bool(config.get("attention_bias", False))


def _always(_: Json) -> bool:
    return True


def _never(_: Json) -> bool:
    return False


FAMILIES: dict[str, Family] = {
    "llama": Family(sliding_windows=_no_windows, has_qkv_bias=_attention_bias, has_output_bias=_attention_bias),
    "mistral": Family(sliding_windows=_one_window, has_qkv_bias=_never, has_output_bias=_never),
    "qwen2": Family(sliding_windows=_layered_windows, has_qkv_bias=_always, has_output_bias=_never),
    "qwen3": Family(
        sliding_windows=_layered_windows,
        has_qkv_bias=_attention_bias,
        has_output_bias=_attention_bias,
        has_head_norm=True,
        default_head_size=128,
    ),
}


def parse_config(config: Json) -> DecoderConfig:
    """Read a parsed config.json.

    Raises:
        ModelFolderError: the family, or something that the config asks for, is not known here; or a size is missing.
    """
    name = str(config.get("model_type"))
    family = FAMILIES.get(name)
    if family is None:
        raise ModelFolderError(f"config.json: model_type {name!r} is not one of {', '.join(sorted(FAMILIES))}.")
    if config.get("quantization_config"):
        raise ModelFolderError("config.json: quantized weights are not supported; use a bf16, fp16 or fp32 folder.")
    num_layers = _integer(config, "num_hidden_layers")
    num_heads = _integer(config, "num_attention_heads")
    hidden_size = _integer(config, "hidden_size")
    head_size = _integer(config, "head_dim", family.default_head_size or hidden_size // max(num_heads, 1))
    num_kv_heads = _integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelFolderError(f"config.json: {num_heads} heads are not a multiple of {num_kv_heads} key-value heads.")
    max_position_embeddings = _integer(config, "max_position_embeddings", 2048)
    return DecoderConfig(
        family=name,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        activation=_activation(config),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=family.has_qkv_bias(config),
        has_output_bias=family.has_output_bias(config),
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_head_norm=family.has_head_norm,
        sliding_windows=family.sliding_windows(config, num_layers),
        rope=_parse_rope(config, head_size, max_position_embeddings),
    )


def _parse_rope(config: Json, head_size: int, max_position_embeddings: int) -> RopeConfig:
    """Read `rope_parameters` (from transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    parameters = dict(_object(config.get("rope_parameters")) or _object(config.get("rope_scaling")))
    theta = _number(parameters, "rope_theta", _number(config, "rope_theta", 10_000.0))
    partial = _number(parameters, "partial_rotary_factor", _number(config, "partial_rotary_factor", 1.0))
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    return RopeConfig(
        type=str(parameters.get("rope_type") or parameters.get("type") or "default"),
        theta=theta,
        rotary_size=int(head_size * partial),
        parameters=parameters,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=_integer({"original": original or max_position_embeddings}, "original"),
    )


def _activation(config: Json) -> Activation:
    name = str(config.get("hidden_act", "silu"))
    if name not in _ACTIVATIONS:
        raise ModelFolderError(f"config.json: hidden_act {name!r} is not one of {', '.join(sorted(_ACTIVATIONS))}.")
    return _ACTIVATIONS[name]


def _object(value: object) -> Json:
    # A parsed JSON object has string keys.
    return cast("Json", value) if isinstance(value, dict) else {}


def _integer(config: Json, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelFolderError(f"config.json: {name} must be a whole number, got {value!r}.")
    return value


def _number(config: Json, name: str, default: float) -> float:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelFolderError(f"config.json: {name} must be a number, got {value!r}.")
    return float(value)
