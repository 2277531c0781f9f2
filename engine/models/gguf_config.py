"""The config of a GGUF, as transformers would write it. Knows no tensors' contents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sluice.engine.errors import ModelFolderError
from sluice.engine.gguf.file import GgufFile, Value
from sluice.engine.gguf.tensors import read_tensor
from sluice.engine.models.config_fields import object_of
from sluice.engine.models.families import FAMILIES
from sluice.engine.text.json_files import Json

_GLOBAL_ANGLES, _LONG_ANGLES, _SHORT_ANGLES = (
    f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")
)
"""Tensors of numbers by which the angles of each pair are divided."""

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Fields of an architecture that a config has under another name."""

_BIASES = {"attn_q": "attention_bias", "attn_output": "attention_out_bias", "ffn_down": "mlp_bias"}

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family as llama.cpp names and stores it."""

    model_type: str
    extra: "Callable[[GgufFile, Json], Json]" = lambda _file, _config: {}
    """Fields that follow from others."""

    has_adjacent_pairs: bool = False
    """Whether the rows of query and key are stored in the order of adjacent rotated pairs, unlike in transformers."""

    mlp_norm: str = "ffn_norm"
    """The norm before the feed-forward."""

    has_whole_norms: bool = False
    """Whether norms are stored with the one that transformers adds to them."""

    mixture: str | None = None
    """The family of its files with experts, if another one."""


def _granite(file: GgufFile, _: Json) -> Json:
    names = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
    }
    return _renamed(_fields_of(file), names)


def _qwen2_moe(_: GgufFile, config: Json) -> Json:
    return {"qkv_bias": config["attention_bias"]}


def _qwen3_moe(_file: GgufFile, _config: Json) -> Json:
    """Return what the file does not state, since all published models have it."""
    return {"norm_topk_prob": True}


def _gpt_oss(_: GgufFile, config: Json) -> Json:
    """Return the size of the experts, and what the file does not state of the scaling."""
    scaling = {**object_of(config.get("rope_scaling")), "truncate": False}
    return {"intermediate_size": config.get("moe_intermediate_size"), "rope_scaling": scaling}


def _cohere(file: GgufFile, _: Json) -> Json:
    return _renamed(_fields_of(file), {"logit_scale": "logit_scale"})


_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the largest model of each architecture."""


def _gemma(file: GgufFile, config: Json) -> Json:
    """Return the scale of attention, which the file does not state: in the largest models it is that of the width."""
    layers, hidden, heads = map(config.get, ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    is_largest = layers == _LARGEST_GEMMA.get(str(file.metadata.get("general.architecture")), 0)
    if not is_largest or not isinstance(hidden, int) or not isinstance(heads, int):
        return {"query_pre_attn_scalar": config.get("head_dim")}
    return {"query_pre_attn_scalar": hidden // max(heads, 1)}


def _gemma3(file: GgufFile, config: Json) -> Json:
    scaling = config.get("rope_scaling")
    return {**_gemma(file, config), "rope_scaling": scaling, "rope_theta": config.get("rope_theta", 1e6)}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", has_adjacent_pairs=True, mixture="mixtral"),
    "smollm3": Architecture("smollm3", has_adjacent_pairs=True),
    "granite": Architecture("granite", _granite, has_adjacent_pairs=True),
    "granitemoe": Architecture("granitemoe", _granite, has_adjacent_pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", _qwen2_moe),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, mlp_norm="post_attention_norm"),
    "seed_oss": Architecture("seed_oss", mlp_norm="post_attention_norm"),
    "gemma": Architecture("gemma", has_whole_norms=True),
    "gemma2": Architecture("gemma2", _gemma, has_whole_norms=True),
    "gemma3": Architecture("gemma3_text", _gemma3, has_whole_norms=True),
    "phi3": Architecture("phi3"),
    "olmo2": Architecture("olmo2"),
    "glm4": Architecture("glm4"),
    "exaone4": Architecture("exaone4"),
    "command-r": Architecture("cohere", _cohere),
    "cohere2": Architecture("cohere2", _cohere),
}


def architecture_of(file: GgufFile) -> Architecture:
    """Return a file's architecture.

    Raises:
        ModelFolderError: it is not supported.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelFolderError(f"{file.path}: architecture {name!r} is not one of {known}.")
    return ARCHITECTURES[name]


def config_of(file: GgufFile) -> Json:
    """Return the config of a file.

    Raises:
        ModelFolderError: the architecture is not supported, the file is a part of a model, or a tensor that its config
            has as numbers cannot be read.
    """
    architecture = architecture_of(file)
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ModelFolderError(f"{file.path} is one part of a model: merge them with llama-gguf-split --merge.")
    config: dict[str, object] = {
        "model_type": _model_type(file, architecture),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **{name: f"blk.0.{tensor}.bias" in file.tensors for tensor, name in _BIASES.items()},
        **_renamed(_fields_of(file), _SIZES),
    }
    config |= _rope(file, config)
    config |= {"eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id")}
    return {**config, **architecture.extra(file, config)}


def _model_type(file: GgufFile, architecture: Architecture) -> str:
    num_experts = _fields_of(file).get("expert_count")
    model_type = architecture.mixture if num_experts and architecture.mixture else architecture.model_type
    if bool(num_experts) != (FAMILIES[model_type].experts is not None):
        name = file.metadata["general.architecture"]
        raise ModelFolderError(f"{file.path}: expert_count is {num_experts}, which is not supported for {name!r}.")
    return model_type


def generation_config_of(file: GgufFile) -> Json:
    """Return the end tokens and the sampling defaults that a file states."""
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    stated = {f"general.sampling.{name}": field for name, field in _SAMPLING.items()}
    return {"eos_token_id": [end for end in ends if end is not None] or None, **_renamed(file.metadata, stated)}


def _fields_of(file: GgufFile) -> Mapping[str, Value]:
    """Return the fields of the file's architecture, without its name."""
    prefix = f"{file.metadata.get('general.architecture')}."
    return {name.removeprefix(prefix): value for name, value in file.metadata.items() if name.startswith(prefix)}


def _renamed(fields: Mapping[str, Value], names: Mapping[str, str]) -> dict[str, object]:
    return {new: fields[old] for old, new in names.items() if old in fields}


def _vocab_size(file: GgufFile) -> object:
    embedding = file.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding is not None else None


def _rope(file: GgufFile, config: Json) -> Json:
    """Return the scaling of the rotary embedding."""
    fields = _fields_of(file)
    rope: dict[str, object] = {}
    rotated, head_size = fields.get("rope.dimension_count"), config.get("head_dim")
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if head_size is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        head_size = hidden // heads
    if isinstance(rotated, int) and isinstance(head_size, int) and 0 < rotated < head_size:
        rope["partial_rotary_factor"] = rotated / head_size
    parameters = _scaling(file, fields)
    return {**rope, "rope_scaling": parameters} if parameters else rope


def _scaling(file: GgufFile, fields: Mapping[str, Value]) -> dict[str, object]:
    kind, factor = fields.get("rope.scaling.type", "none"), fields.get("rope.scaling.factor")
    original = fields.get("rope.scaling.original_context_length")
    attention = fields.get("rope.scaling.attn_factor")
    given = {"factor": factor, "original_max_position_embeddings": original}
    known = {name: value for name, value in given.items() if value is not None}
    if _LONG_ANGLES in file.tensors or _SHORT_ANGLES in file.tensors:
        lists = {"short_factor": _SHORT_ANGLES, "long_factor": _LONG_ANGLES}
        factors = {name: _numbers(file, tensor) for name, tensor in lists.items()}
        magnitude = {} if attention is None else {"attention_factor": attention}
        return {"rope_type": "longrope", **known, **factors, **magnitude}
    if _GLOBAL_ANGLES in file.tensors:
        return {"rope_type": "divided", "divisors": _numbers(file, _GLOBAL_ANGLES)}
    if kind in ("linear", "yarn") and factor is not None:
        return {"rope_type": kind, **known}
    # Older files state a factor alone.
    scale = fields.get("rope.scale_linear")
    return {"rope_type": "linear", "factor": scale} if scale not in (None, 0.0, 1.0) else {}


def _numbers(file: GgufFile, name: str) -> list[float]:
    if name not in file.tensors:
        raise ModelFolderError(f"{file.path} has no tensor {name}: it does not belong to its fields.")
    try:
        return read_tensor(file.path, file.tensors[name]).tolist()
    except OSError as error:
        raise ModelFolderError(f"tensor {name!r} of {file.path} cannot be read: {error}.") from error
