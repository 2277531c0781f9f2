"""Decoder configuration, read from a Hugging Face config.json of any version.

A family is a row of `FAMILIES`: how its config differs from Llama's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeGuard, cast

from sluice.engine.errors import ModelFolderError
from sluice.engine.text.json_files import Json
from sluice.kernels.decoder_shape import DecoderShape
from sluice.kernels.gated_activation import Activation

_LARGEST = 2**31 - 1
_MOST_LAYERS = 10_000
_LONGEST_CONTEXT = 2**24
_GREATEST = 3e38
"""Float32 holds no greater number."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: its type and parameters."""

    type: str
    theta: float
    rotary_size: int
    """Elements of a head that are rotated."""

    parameters: Json
    """Further parameters of the config (factor, low_freq_factor, short_factor ...)."""

    max_position_embeddings: int
    original_max_position_embeddings: int
    """Context length of the pretraining, before the embedding was extended."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles depend on the longest sequence that a worker allows."""
        return self.type in ("dynamic", "longrope")

    @property
    def longest_context(self) -> int:
        """The longest context: the config's, or longer if YaRN was enabled as model cards describe it."""
        stated = [self.parameters.get(name) for name in ("factor", "original_max_position_embeddings")]
        if self.type != "yarn" or None in stated:
            return self.max_position_embeddings
        original = _integer(self.parameters, "original_max_position_embeddings", most=_LONGEST_CONTEXT)
        extended = original * _positive(self.parameters, "factor", 1.0)
        return max(self.max_position_embeddings, int(min(extended, _LONGEST_CONTEXT)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(DecoderShape):
    """One decoder, as its folder's config describes it."""

    family: str
    num_layers: int
    max_position_embeddings: int
    embedding_scale: float
    """Factor on the embedding, before it is rounded to the dtype."""

    is_tied: bool
    """Whether the output projection shares the embedding's weights."""

    sliding_windows: tuple[int, ...]
    """Sliding window per layer: a token attends to this many tokens, itself included. 0: all."""

    rope: RopeConfig
    local_rope: RopeConfig | None
    """Rotary embedding of layers with a window, if they have a separate one."""

    @property
    def window_of_all_layers(self) -> int:
        """Tokens beyond which no layer of this model attends; 0: some layer attends to all."""
        return max(self.sliding_windows) if all(self.sliding_windows) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Differences of one model_type: defaults that its configs omit, and switches."""

    sliding_windows: Callable[[Json, int], tuple[int, ...]]
    has_qkv_bias: Callable[[Json], bool]
    has_output_bias: Callable[[Json], bool]
    has_head_norm: bool = False
    default_head_size: int | None = None
    """None: hidden size divided by heads."""

    has_post_norms: bool = False
    norm_offset: float = 0.0
    scales_embedding: bool = False
    """Scale the embedding by the root of the hidden size."""

    has_local_rope: bool = False
    activation_name: str = "hidden_act"
    defaults: Json = field(default_factory=dict[str, object])
    """Values that the family's configs omit."""

    refused: tuple[str, ...] = ()
    """Switches that are not supported if set."""


def _no_windows(_: Json, num_layers: int) -> tuple[int, ...]:
    return (0,) * num_layers


def _one_window(config: Json, num_layers: int) -> tuple[int, ...]:
    return (_window(config),) * num_layers


def _window(config: Json) -> int:
    """Return the window that a config states, 0 if it states none by null."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return 0
    return _integer(config, "sliding_window", 4096, least=0)


def _layered_windows(config: Json, num_layers: int) -> tuple[int, ...]:
    """Return Qwen's windows: only if enabled, on the layers in `layer_types` or else from `max_window_layers` on."""
    if not _switch(config, "use_sliding_window"):
        return (0,) * num_layers
    window = _window(config)
    if config.get("layer_types") is not None:
        return _windows_by_type(config, num_layers, window)
    first = _integer(config, "max_window_layers", 28, least=0)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _every_second_window(config: Json, num_layers: int) -> tuple[int, ...]:
    """Return Gemma 2's windows without `layer_types`: every other layer, starting with the first."""
    return _periodic_windows(config, num_layers, 2)


def _pattern_of_windows(config: Json, num_layers: int) -> tuple[int, ...]:
    """Return Gemma 3's windows without `layer_types`: all but the last of each `sliding_window_pattern` layers."""
    return _periodic_windows(config, num_layers, _integer(config, "sliding_window_pattern", 6))


def _periodic_windows(config: Json, num_layers: int, period: int) -> tuple[int, ...]:
    window = _integer(config, "sliding_window")
    if config.get("layer_types") is not None:
        return _windows_by_type(config, num_layers, window)
    return tuple(window if (layer + 1) % period else 0 for layer in range(num_layers))


def _windows_by_type(config: Json, num_layers: int, window: int) -> tuple[int, ...]:
    layer_types = config.get("layer_types")
    kinds = cast("list[object]", layer_types) if isinstance(layer_types, list) else []
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ModelFolderError(
            f"config.json: layer_types must name {num_layers} layers, each sliding_attention or full_attention; "
            f"got {layer_types!r}."
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _attention_bias(config: Json) -> bool:
    return _switch(config, "attention_bias")


def _always(_: Json) -> bool:
    return True


def _never(_: Json) -> bool:
    return False


_GEMMA_DEFAULTS: dict[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

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
    "gemma2": Family(
        sliding_windows=_every_second_window,
        has_qkv_bias=_attention_bias,
        has_output_bias=_attention_bias,
        default_head_size=256,
        has_post_norms=True,
        norm_offset=1.0,
        scales_embedding=True,
        activation_name="hidden_activation",
        defaults=_GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        refused=("use_bidirectional_attention",),
    ),
    "gemma3_text": Family(
        sliding_windows=_pattern_of_windows,
        has_qkv_bias=_attention_bias,
        has_output_bias=_attention_bias,
        has_head_norm=True,
        default_head_size=256,
        has_post_norms=True,
        norm_offset=1.0,
        scales_embedding=True,
        has_local_rope=True,
        activation_name="hidden_activation",
        defaults=_GEMMA_DEFAULTS
        | {"max_position_embeddings": 131_072, "num_attention_heads": 8, "vocab_size": 262_208},
        # Its configs contain an attention soft cap, but transformers does not apply it.
        refused=("use_bidirectional_attention", "attn_logit_softcapping"),
    ),
}


_TEXT_PARTS = {"gemma3": "gemma3_text"}
"""Models of text and images, and the family of their text part."""


def known_families() -> list[str]:
    """Return the model types that can be loaded, in order."""
    return sorted({*FAMILIES, *_TEXT_PARTS})


def text_part(config: Json) -> Json:
    """Return the config of a model's text part: of most models, the config itself."""
    family = _TEXT_PARTS.get(str(config.get("model_type")))
    return config if family is None else {**config, **_object(config.get("text_config")), "model_type": family}


def parse_config(config: Json) -> DecoderConfig:
    """Read a parsed config.json.

    Raises:
        ModelFolderError: the family or a setting is not supported, or a size is missing.
    """
    family = _family_of(config)
    config = {**family.defaults, **config}
    num_layers = _integer(config, "num_hidden_layers", most=_MOST_LAYERS)
    num_heads = _integer(config, "num_attention_heads")
    hidden_size = _integer(config, "hidden_size")
    head_size = _head_size(config, family, hidden_size // num_heads)
    num_kv_heads = _integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelFolderError(f"config.json: {num_heads} heads are not a multiple of {num_kv_heads} key-value heads.")
    max_position_embeddings = _integer(config, "max_position_embeddings", 2048, most=_LONGEST_CONTEXT)
    return DecoderConfig(
        family=str(config["model_type"]),
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        norm_offset=family.norm_offset,
        has_post_norms=family.has_post_norms,
        activation=_activation(config, family.activation_name),
        attention_scale=_positive(config, "query_pre_attn_scalar", head_size) ** -0.5,
        attention_soft_cap=_soft_cap(config, "attn_logit_softcapping"),
        final_soft_cap=_soft_cap(config, "final_logit_softcapping"),
        embedding_scale=hidden_size**0.5 if family.scales_embedding else 1.0,
        is_tied=_switch(config, "tie_word_embeddings"),
        has_qkv_bias=family.has_qkv_bias(config),
        has_output_bias=family.has_output_bias(config),
        has_mlp_bias=_switch(config, "mlp_bias"),
        has_head_norm=family.has_head_norm,
        sliding_windows=family.sliding_windows(config, num_layers),
        rope=_parse_rope(_rope_of(config, family, "full_attention"), head_size, max_position_embeddings),
        local_rope=_parse_rope(_rope_of(config, family, "sliding_attention"), head_size, max_position_embeddings)
        if family.has_local_rope
        else None,
    )


def _head_size(config: Json, family: Family, default: int) -> int:
    size = _integer(config, "head_dim", family.default_head_size or default)
    if size % 2:
        raise ModelFolderError(
            f"config.json: head_dim (or hidden_size divided by num_attention_heads) must be even, since rotary "
            f"embeddings rotate pairs of elements, got {size}."
        )
    return size


def _family_of(config: Json) -> Family:
    """Return the row of `FAMILIES`, and check that the config asks for nothing unsupported."""
    name = str(config.get("model_type"))
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(known_families())
        raise ModelFolderError(f"config.json: model_type {name!r} is not one of {known}.")
    if config.get("quantization_config"):
        raise ModelFolderError("config.json: quantized weights are not supported; use a bf16, fp16 or fp32 folder.")
    for switch in family.refused:
        if config.get(switch):
            raise ModelFolderError(f"config.json: {switch} {config[switch]!r} is not supported for {name}.")
    return family


def _rope_of(config: Json, family: Family, layer_type: str) -> Json:
    """Return the config of one layer type: Gemma 3 has two rotary bases, and scales only the global one."""
    if not family.has_local_rope:
        return config
    given = config.get("rope_parameters")
    by_type = _object(given)
    if (given is not None and not isinstance(given, dict)) or not by_type.keys() <= {
        "full_attention",
        "sliding_attention",
    }:
        raise ModelFolderError(
            f"config.json: rope_parameters must be given separately for full_attention and sliding_attention, "
            f"got {given!r}."
        )
    parameters = dict(_object(by_type.get(layer_type)))
    if layer_type == "full_attention":
        parameters |= _optional_object(config, "rope_scaling")
        theta = _number(config, "rope_theta", 1_000_000.0)
    else:
        theta = _number(config, "rope_local_base_freq", 10_000.0)
    return {**config, "rope_parameters": {"rope_theta": theta, **parameters}}


def _parse_rope(config: Json, head_size: int, max_position_embeddings: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5 and later), or `rope_theta` and `rope_scaling` (before)."""
    parameters = dict(_optional_object(config, "rope_parameters") or _optional_object(config, "rope_scaling"))
    theta = _positive(parameters, "rope_theta", _positive(config, "rope_theta", 10_000.0))
    name = "original_max_position_embeddings"
    original = _integer(parameters, name, max_position_embeddings, most=_LONGEST_CONTEXT)
    return RopeConfig(
        type=str(parameters.get("rope_type") or parameters.get("type") or "default"),
        theta=theta,
        rotary_size=_rotary_size(parameters, config, head_size),
        parameters=parameters,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=_integer(config, name, original, most=_LONGEST_CONTEXT),
    )


def _rotary_size(parameters: Json, config: Json, head_size: int) -> int:
    name = "partial_rotary_factor"
    factor = _positive(parameters, name, _positive(config, name, 1.0))
    size = int(head_size * factor)
    if factor > 1 or size % 2 or size < 2:
        raise ModelFolderError(
            f"config.json: {name} must be at most 1 and rotate an even number of the {head_size} elements of a head, "
            f"got {factor:g}."
        )
    return size


def _activation(config: Json, key: str) -> Activation:
    name = str(config.get(key, "silu"))
    if name not in _ACTIVATIONS:
        raise ModelFolderError(f"config.json: {key} {name!r} is not one of {', '.join(sorted(_ACTIVATIONS))}.")
    return _ACTIVATIONS[name]


def _object(value: object) -> Json:
    # A parsed JSON object has string keys.
    return cast("Json", value) if isinstance(value, dict) else {}


def _optional_object(config: Json, name: str) -> Json:
    value = config.get(name)
    if not isinstance(value, dict | None):
        raise ModelFolderError(f"config.json: {name} must be an object or null, got {value!r}.")
    return _object(config.get(name))


def _integer(config: Json, name: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ModelFolderError(f"config.json: {name} must be a whole number from {least} to {most}, got {value!r}.")
    return value


def _number(config: Json, name: str, default: float) -> float:
    value = config.get(name)
    value = default if value is None else value
    if not is_number(value):
        raise ModelFolderError(f"config.json: {name} must be a number, got {value!r}.")
    return float(value)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that float32 holds: JSON as Python reads it has others."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _GREATEST


def _positive(config: Json, name: str, default: float) -> float:
    value = _number(config, name, default)
    if value <= 0:
        raise ModelFolderError(f"config.json: {name} must be above 0, got {value:g}.")
    return value


def _switch(config: Json, name: str) -> bool:
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise ModelFolderError(f"config.json: {name} must be true or false, got {value!r}.")
    return value is True


def _soft_cap(config: Json, name: str) -> float:
    """Return a number of the config; 0 if it is absent."""
    return 0.0 if config.get(name) is None else _positive(config, name, 0.0)
