"""GGUF files of tiny models, written by the `gguf` package as llama.cpp's converter writes them."""

# The package's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

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
}
"""llama.cpp's name by model_type."""

ADJACENT = ("llama", "smollm3", "granite")
"""Whose converter writes rotated pairs beside each other."""


def write_model(folder: Path, path: Path, kind: gguf.GGMLQuantizationType, fields: Mapping[str, Any]) -> None:
    """Write a folder of transformers to `path`, its matrices as `kind` where their rows permit it."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_fields(writer, config)
    for name, value in fields.items():
        write_field(writer, name.format(arch=architecture), value)
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        array = _converted(name, tensor, config)
        _write_tensor(writer, stored, array, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def _converted(name: str, tensor: np.ndarray[Any, Any], config: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    family = config["model_type"]
    if family in ADJACENT and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, array: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType
) -> None:
    is_packed = array.ndim > 1 and array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    if not is_packed or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, array.astype(np.float32))
        return
    writer.add_tensor(name, gguf.quants.quantize(array.astype(np.float32), kind), raw_dtype=kind)
