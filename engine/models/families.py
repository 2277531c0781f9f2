"""The families of decoders: how each differs from Llama. A new family is a row of `FAMILIES`.

Knows how configs are written and tensors are named, not how a step is computed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from sluice.engine.errors import ModelFolderError
from sluice.engine.models.config_fields import integer, object_of, positive, switch
from sluice.engine.models.mixtures import (
    GPT_OSS_EXPERTS,
    GRANITE_EXPERTS,
    MIXTRAL_EXPERTS,
    QWEN2_EXPERTS,
    QWEN3_EXPERTS,
    ExpertRules,
)
from sluice.engine.text.json_files import Json


@dataclass(frozen=True, slots=True)
class BlockNorms:
    """Names of a block's norms in its weights; None for one that it does not have."""

    attention: str | None = "input_layernorm"
    attention_post: str | None = None
    """Of the attention's output, before it is added to the residual."""

    mlp: str | None = "post_attention_layernorm"
    mlp_post: str | None = None
    """Like `attention_post`; both are set or neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRope:
    """A rotary embedding of layers with a window, separate from that of the others."""

    theta_name: str
    """Field of the base before transformers 5."""

    theta: float
    """Base of either embedding if the config states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Constant factors."""

    embedding: float = 1.0
    residual: float = 1.0
    """On what a block adds to the residual."""

    attention: float | None = None
    """On attention scores; None: one over the root of the head size."""

    logits: float = 1.0


def _no_windows(_: Json, num_layers: int) -> tuple[int, ...]:
    return (0,) * num_layers


def _every_layer(_: Json, windows: tuple[int, ...]) -> tuple[bool, ...]:
    return (True,) * len(windows)


def _no_multipliers(_: Json) -> Multipliers:
    return Multipliers()


def _attention_bias(config: Json) -> bool:
    return switch(config, "attention_bias")


def _never(_: Json) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Differences of one model_type from Llama: names, switches, and defaults that its configs omit."""

    sliding_windows: Callable[[Json, int], tuple[int, ...]] = _no_windows
    rotated_layers: Callable[[Json, tuple[int, ...]], tuple[bool, ...]] = _every_layer
    """Whether each layer rotates queries and keys, given its window. Layers without (NoPE) know no positions."""

    has_qkv_bias: Callable[[Json], bool] = _attention_bias
    has_output_bias: Callable[[Json], bool] = _attention_bias
    has_head_norm: bool = False
    default_head_size: int | None = None
    """None: hidden size divided by heads."""

    has_row_norm: bool = False
    has_sinks: bool = False
    norms: BlockNorms = BlockNorms()
    eps_name: str = "rms_norm_eps"
    is_norm_centered: bool = False
    is_parallel: bool = False
    norm_offset: float = 0.0
    multipliers: Callable[[Json], Multipliers] = _no_multipliers
    is_embedding_scale_rounded: bool = False
    """Whether the factor on the embedding is rounded to the dtype before it is used."""

    local_rope: LocalRope | None = None
    rope_types: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names that its configs have for a type of rotary embedding."""

    has_adjacent_pairs: bool = False
    """Whether the rotated pairs of a head are elements 2 * i and 2 * i + 1, not i and i + R / 2."""

    is_qkv_fused: bool = False
    """Whether the projections of queries, keys and values are stored as one tensor."""

    is_gate_up_fused: bool = False
    experts: ExpertRules | None = None
    """None: every feed-forward is dense."""

    activation_name: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names that its configs have for an activation that transformers computes by another name."""

    defaults: Json = field(default_factory=dict[str, object])
    """Values that the family's configs omit."""

    refused: tuple[str, ...] = ()
    """Switches that are not supported if set."""

    end_tokens: tuple[str, ...] = ()
    """Tokens that end an answer, whatever the files of a model state: a GGUF may state only one of several."""


def _one_window(config: Json, num_layers: int) -> tuple[int, ...]:
    return (_window(config),) * num_layers


def _window(config: Json) -> int:
    """Return the window that a config states, 0 if it states none by null."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return 0
    return integer(config, "sliding_window", 4096, least=0)


def _switched_window(config: Json, num_layers: int) -> tuple[int, ...]:
    """Return the windows of Qwen3-MoE: if enabled, one for all layers."""
    return (_window(config) if switch(config, "use_sliding_window") else 0,) * num_layers


def _alternating_windows(config: Json, num_layers: int) -> tuple[int, ...]:
    """Return Qwen2-MoE's windows: only if enabled, and without `layer_types` on each second layer of the first."""
    if not switch(config, "use_sliding_window") or config.get("layer_types") is not None:
        return _layered_windows(config, num_layers)
    window, end = _window(config), integer(config, "max_window_layers", 28, least=0)
    return tuple(window if layer % 2 == 0 and layer < end else 0 for layer in range(num_layers))


def _layered_windows(config: Json, num_layers: int) -> tuple[int, ...]:
    """Return Qwen's windows: only if enabled, on the layers in `layer_types` or else from `max_window_layers` on."""
    if not switch(config, "use_sliding_window"):
        return (0,) * num_layers
    window = _window(config)
    if config.get("layer_types") is not None:
        return _windows_by_type(config, num_layers, window)
    first = integer(config, "max_window_layers", 28, least=0)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _typed_or_one_window(config: Json, num_layers: int) -> tuple[int, ...]:
    """Return Ministral's windows: those of `layer_types`, else one for all layers."""
    if config.get("layer_types") is None:
        return _one_window(config, num_layers)
    return _windows_by_type(config, num_layers, _window(config))


def _every_second_window(config: Json, num_layers: int) -> tuple[int, ...]:
    """Return Gemma 2's windows without `layer_types`: every other layer, starting with the first."""
    return _periodic_windows(config, num_layers, 2)


def _pattern_of_windows(config: Json, num_layers: int) -> tuple[int, ...]:
    """Return Gemma 3's windows without `layer_types`: all but the last of each `sliding_window_pattern` layers."""
    return _periodic_windows(config, num_layers, integer(config, "sliding_window_pattern", 6))


def _periodic_windows(config: Json, num_layers: int, period: int) -> tuple[int, ...]:
    window = integer(config, "sliding_window")
    if config.get("layer_types") is not None:
        return _windows_by_type(config, num_layers, window)
    return tuple(window if (layer + 1) % period else 0 for layer in range(num_layers))


def _windows_by_type(config: Json, num_layers: int, window: int) -> tuple[int, ...]:
    layer_types = config.get("layer_types")
    kinds = cast("list[object]", layer_types) if isinstance(layer_types, list) else []
    if len(kinds) != num_layers or not {str(kind) for kind in kinds} <= {"sliding_attention", "full_attention"}:
        raise ModelFolderError(
            f"config.json: layer_types must name {num_layers} layers, each sliding_attention or full_attention; "
            f"got {layer_types!r}."
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _smollm3_windows(config: Json, num_layers: int) -> tuple[int, ...]:
    """Return SmolLM3's windows without `layer_types`: if enabled, on the layers that do not rotate."""
    window = _window(config) if switch(config, "use_sliding_window") else 0
    if not window or config.get("layer_types") is not None:
        return _layered_windows(config, num_layers)
    return tuple(0 if rotates else window for rotates in _listed_layers(config, (0,) * num_layers))


def _listed_layers(config: Json, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Return SmolLM3's rotated layers: those of `no_rope_layers`, else all but each fourth."""
    listed = config.get("no_rope_layers")
    if listed is None:
        period = integer(config, "no_rope_layer_interval", 4)
        return tuple(bool((layer + 1) % period) for layer in range(len(windows)))
    marks = cast("list[object]", listed) if isinstance(listed, list) else []
    if len(marks) < len(windows) or not all(isinstance(mark, int) and 0 <= mark <= 1 for mark in marks):
        raise ModelFolderError(
            f"config.json: no_rope_layers must be a list of {len(windows)} numbers, 0 for a layer that does not "
            f"rotate, else 1; got {listed!r}."
        )
    return tuple(bool(mark) for mark in marks[: len(windows)])


def _every_fourth_full(config: Json, num_layers: int) -> tuple[int, ...]:
    """Return the windows of OLMo 3, EXAONE 4 and Cohere2 without `layer_types`: all but each fourth layer has one."""
    if config.get("sliding_window") is None:
        return (0,) * num_layers
    return _periodic_windows(config, num_layers, integer(config, "sliding_window_pattern", 4))


def _windowed_layers(_: Json, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Return the rotated layers of Cohere2: those with a window."""
    return tuple(map(bool, windows))


def _windowed_layers_if_any(config: Json, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Return the rotated layers of EXAONE 4: those with a window, or all if the model has no window."""
    return tuple(bool(window) or config.get("sliding_window") is None for window in windows)


def _cohere_multipliers(config: Json) -> Multipliers:
    return Multipliers(logits=positive(config, "logit_scale", 0.0625))


def _always(_: Json) -> bool:
    return True


def _qkv_bias(config: Json) -> bool:
    return switch(config, "qkv_bias")


def _attention_out_bias(config: Json) -> bool:
    return switch(config, "attention_out_bias")


def _gemma_multipliers(config: Json) -> Multipliers:
    scalar = config.get("query_pre_attn_scalar")
    return Multipliers(
        embedding=integer(config, "hidden_size") ** 0.5,
        attention=None if scalar is None else positive(config, "query_pre_attn_scalar", 1.0) ** -0.5,
    )


def _granite_multipliers(config: Json) -> Multipliers:
    return Multipliers(
        embedding=positive(config, "embedding_multiplier", 1.0),
        residual=positive(config, "residual_multiplier", 1.0),
        attention=positive(config, "attention_multiplier", 1.0),
        logits=1.0 / positive(config, "logits_scaling", 1.0),
    )


_GEMMA_NORMS = BlockNorms(
    attention_post="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_post="post_feedforward_layernorm",
)
_GEMMA_DEFAULTS: dict[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_POST_NORMS = BlockNorms(
    attention=None, attention_post="post_attention_layernorm", mlp=None, mlp_post="post_feedforward_layernorm"
)
_PARALLEL_NORMS = BlockNorms(mlp=None)
_COHERE_DEFAULTS: dict[str, object] = {
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GLM_DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 2,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131_072,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(sliding_windows=_one_window, has_qkv_bias=_never, has_output_bias=_never),
    "ministral": Family(
        sliding_windows=_typed_or_one_window,
        has_qkv_bias=_never,
        has_output_bias=_never,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    ),
    "qwen2": Family(sliding_windows=_layered_windows, has_qkv_bias=_always, has_output_bias=_never),
    "qwen3": Family(sliding_windows=_layered_windows, has_head_norm=True, default_head_size=128),
    "mixtral": Family(
        sliding_windows=_one_window,
        has_qkv_bias=_never,
        has_output_bias=_never,
        experts=MIXTRAL_EXPERTS,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
    ),
    "qwen2_moe": Family(
        sliding_windows=_alternating_windows,
        has_qkv_bias=_qkv_bias,
        has_output_bias=_never,
        experts=QWEN2_EXPERTS,
        defaults={"num_key_value_heads": 16, "max_position_embeddings": 32_768, "qkv_bias": True},
    ),
    "qwen3_moe": Family(
        sliding_windows=_switched_window,
        has_head_norm=True,
        experts=QWEN3_EXPERTS,
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32_768},
    ),
    "seed_oss": Family(
        has_output_bias=_attention_out_bias,
        default_head_size=128,
        defaults={"num_key_value_heads": 8, "attention_bias": True, "max_position_embeddings": 524_288},
    ),
    "smollm3": Family(
        sliding_windows=_smollm3_windows,
        rotated_layers=_listed_layers,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
    ),
    "granite": Family(multipliers=_granite_multipliers),
    "granitemoe": Family(
        multipliers=_granite_multipliers, experts=GRANITE_EXPERTS, refused=("shared_expert_intermediate_size",)
    ),
    "gpt_oss": Family(
        sliding_windows=_every_second_window,
        has_qkv_bias=_attention_bias,
        has_output_bias=_attention_bias,
        has_sinks=True,
        default_head_size=64,
        experts=GPT_OSS_EXPERTS,
        # Of its chat format, Harmony: `<|end|>` ends a message, which another one follows.
        end_tokens=("<|return|>", "<|call|>", "<|endoftext|>"),
        # What its configs call silu is cut, and one is added to what it gates.
        activations={"silu": "swiglu_clamped"},
        defaults={
            "attention_bias": True,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "phi3": Family(
        sliding_windows=_one_window,
        has_qkv_bias=_never,
        has_output_bias=_never,
        # Its configs call LongRoPE by older names.
        rope_types={"su": "longrope", "yarn": "longrope"},
        is_qkv_fused=True,
        is_gate_up_fused=True,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None},
    ),
    "olmo2": Family(has_row_norm=True, norms=_POST_NORMS, defaults={"rms_norm_eps": 1e-5}),
    "olmo3": Family(
        sliding_windows=_every_fourth_full,
        has_row_norm=True,
        norms=_POST_NORMS,
        local_rope=LocalRope(theta_name="rope_theta", theta=500_000.0),
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "exaone4": Family(
        sliding_windows=_every_fourth_full,
        rotated_layers=_windowed_layers_if_any,
        has_qkv_bias=_never,
        has_output_bias=_never,
        has_head_norm=True,
        norms=_POST_NORMS,
        defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "cohere": Family(
        has_adjacent_pairs=True,
        norms=_PARALLEL_NORMS,
        eps_name="layer_norm_eps",
        is_norm_centered=True,
        is_parallel=True,
        multipliers=_cohere_multipliers,
        defaults=_COHERE_DEFAULTS | {"rope_theta": 500_000.0},
        refused=("use_qk_norm",),
    ),
    "cohere2": Family(
        sliding_windows=_every_fourth_full,
        rotated_layers=_windowed_layers,
        has_adjacent_pairs=True,
        norms=_PARALLEL_NORMS,
        eps_name="layer_norm_eps",
        is_norm_centered=True,
        is_parallel=True,
        multipliers=_cohere_multipliers,
        defaults=_COHERE_DEFAULTS | {"sliding_window": 4096},
    ),
    "glm": Family(
        has_output_bias=_never,
        has_adjacent_pairs=True,
        is_gate_up_fused=True,
        default_head_size=128,
        defaults=_GLM_DEFAULTS,
    ),
    "glm4": Family(
        has_output_bias=_never,
        has_adjacent_pairs=True,
        is_gate_up_fused=True,
        default_head_size=128,
        norms=BlockNorms(attention_post="post_self_attn_layernorm", mlp_post="post_mlp_layernorm"),
        defaults=_GLM_DEFAULTS,
    ),
    "gemma": Family(
        default_head_size=256,
        norm_offset=1.0,
        multipliers=_gemma_multipliers,
        is_embedding_scale_rounded=True,
        # transformers computes the tanh form whatever the first configs say.
        activations={"gelu": "gelu_pytorch_tanh"},
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 16,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        refused=("use_bidirectional_attention",),
    ),
    "gemma2": Family(
        sliding_windows=_every_second_window,
        default_head_size=256,
        norms=_GEMMA_NORMS,
        norm_offset=1.0,
        multipliers=_gemma_multipliers,
        is_embedding_scale_rounded=True,
        activation_name="hidden_activation",
        defaults=_GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        refused=("use_bidirectional_attention",),
    ),
    "gemma3_text": Family(
        sliding_windows=_pattern_of_windows,
        has_head_norm=True,
        default_head_size=256,
        norms=_GEMMA_NORMS,
        norm_offset=1.0,
        multipliers=_gemma_multipliers,
        is_embedding_scale_rounded=True,
        local_rope=LocalRope(theta_name="rope_local_base_freq", theta=10_000.0),
        activation_name="hidden_activation",
        defaults=_GEMMA_DEFAULTS
        | {
            "max_position_embeddings": 131_072,
            "num_attention_heads": 8,
            "rope_theta": 1_000_000.0,
            "vocab_size": 262_208,
        },
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
    return config if family is None else {**config, **object_of(config.get("text_config")), "model_type": family}


def family_of(config: Json) -> Family:
    """Return the row of `FAMILIES`, and check that the config asks for nothing unsupported.

    Raises:
        ModelFolderError: the family or a switch is not supported.
    """
    name = str(config.get("model_type"))
    family = FAMILIES.get(name)
    if family is None:
        raise ModelFolderError(
            f"config.json: model_type {name!r} is not one of {', '.join(known_families())}. vLLM may serve it: start "
            f"the worker with --engine vllm."
        )
    for name_of_switch in family.refused:
        if config.get(name_of_switch):
            raise ModelFolderError(
                f"config.json: {name_of_switch} {config[name_of_switch]!r} is not supported for {name}."
            )
    return family
