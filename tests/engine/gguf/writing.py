"""GGUF files of tiny models, written by the `gguf` package as llama.cpp's converter writes them."""

# The package's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

ARCHITECTURES = {
    "llama": "llama",
    "smollm3": "smollm3",
    "granite": "granite",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "seed_oss": "seed_oss",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "glm4": "glm4",
    "exaone4": "exaone4",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "granitemoe": "granitemoe",
    "gpt_oss": "gpt-oss",
}
"""llama.cpp's name by model_type."""

Array: TypeAlias = np.ndarray[Any, Any]
Experts: TypeAlias = Literal["stacked", "fused", "apart"]
"""How a file has the experts of a layer: one tensor of all for each projection, gate and up projection in one, or a
tensor for each expert.
"""

_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)")
_GATE_UP = "input_linear.weight"
_ROUTER = re.compile(r"ffn_gate_inp|\.gate\.|\.router\.|shared_expert_gate|bias")

ADJACENT = ("llama", "smollm3", "granite", "mixtral", "granitemoe")
"""Whose converter writes rotated pairs beside each other."""


def write_model(
    folder: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType,
    fields: Mapping[str, Any],
    *,
    experts: Experts = "stacked",
) -> None:
    """Write a folder of transformers to `path`, its matrices as `kind` where their rows permit it."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_fields(writer, config)
    for name, value in fields.items():
        write_field(writer, name.format(arch=architecture), value)
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    arrays: dict[str, Array] = {}
    for name, tensor in _stacked(load_file(folder / "model.safetensors")).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        arrays[stored] = _converted(name, tensor, config)
    for stored, array in _arranged(arrays, experts).items():
        _write_tensor(writer, stored, array, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arranged(arrays: Mapping[str, Array], experts: Experts) -> dict[str, Array]:
    """The tensors as a file has them whose experts are stored so."""
    arranged: dict[str, Array] = {}
    for name, array in arrays.items():
        if experts == "stacked" or "_exps." not in name:
            arranged[name] = array
        elif experts == "apart":
            block, kind = name.split("_exps.")
            arranged |= {f"{block}.{number}.{kind}": each for number, each in enumerate(array)}
        elif "ffn_gate_exps" in name:
            up = arrays[name.replace("ffn_gate", "ffn_up")]
            arranged[name.replace("ffn_gate", "ffn_gate_up")] = np.concatenate([array, up], axis=1)
        elif "ffn_up_exps" not in name:
            arranged[name] = array
    return arranged


def _stacked(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of all experts of a layer in one, gate and up projection apart."""
    stacked: dict[str, Array] = {}
    by_expert: dict[str, dict[int, Array]] = {}
    for name, tensor in tensors.items():
        if expert := _EXPERT.search(name):
            by_expert.setdefault(_EXPERT.sub("", name), {})[int(expert[1])] = tensor
        elif ".experts." in name or name.endswith("sinks"):
            stacked |= _of_gpt_oss(name, tensor)
        elif name.endswith(_GATE_UP):
            gate, up = np.split(tensor, 2, axis=1)
            block = name.removesuffix(_GATE_UP)
            stacked |= {f"{block}experts.w1.weight": gate, f"{block}experts.w3.weight": up}
        else:
            stacked[name] = tensor
    return stacked | {name: np.stack([each[e] for e in sorted(each)]) for name, each in by_expert.items()}


def _of_gpt_oss(name: str, tensor: Array) -> dict[str, Array]:
    """Its tensors have no suffix; matrices are transposed, and the rows of gate and up projection alternate."""
    base, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    rows = tensor.swapaxes(1, 2) if tensor.ndim == 3 else tensor
    if not base.endswith("gate_up_proj"):
        return {f"{base}.{kind}": np.ascontiguousarray(rows)}
    experts = base.removesuffix("gate_up_proj")
    apart = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
    return {f"{experts}{part}.{kind}": np.ascontiguousarray(found) for part, found in apart.items()}


def rounded_folder(folder: Path, out: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """Write to `out` a folder of transformers with the numbers that a file of `kind` has."""
    out.mkdir()
    (out / "config.json").write_text((folder / "config.json").read_text())
    tensors = {name: _rounded(name, tensor, kind) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, out / "model.safetensors")
    return out


def _rounded(name: str, tensor: Array, kind: gguf.GGMLQuantizationType) -> Array:
    is_transposed = ".experts." in name and tensor.ndim == 3
    rows = np.ascontiguousarray(tensor.swapaxes(1, 2)) if is_transposed else tensor
    if not _is_packed(name, rows, kind):
        return tensor
    numbers = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind).reshape(rows.shape)
    return np.ascontiguousarray(numbers.swapaxes(1, 2)) if is_transposed else numbers


def write_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    """Write one metadata field."""
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)


def _write_fields(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(size)
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, write in {
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
    }.items():
        if config.get(name):
            write(config[name])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def _converted(name: str, tensor: Array, config: Mapping[str, Any]) -> Array:
    family = config["model_type"]
    if family in ADJACENT and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor.squeeze()


def _is_packed(name: str, array: Array, kind: gguf.GGMLQuantizationType) -> bool:
    """Whether a matrix has whole blocks, and is no router."""
    has_blocks = array.squeeze().ndim > 1 and array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    return has_blocks and not _ROUTER.search(name)


def _write_tensor(writer: gguf.GGUFWriter, name: str, array: Array, kind: gguf.GGMLQuantizationType) -> None:
    if kind == gguf.GGMLQuantizationType.F32 or not _is_packed(name, array, kind):
        writer.add_tensor(name, array.astype(np.float32))
        return
    writer.add_tensor(name, gguf.quants.quantize(array.astype(np.float32), kind), raw_dtype=kind)
