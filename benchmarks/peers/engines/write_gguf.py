"""Write a folder of a shape of `benchmarks engines` as GGUF: `python write_gguf.py FOLDER OUT bf16|int8|int4`.

int8 is Q8_0; int4 is Q4_0, with the embedding and the output in Q8_0.
The vocabulary is a list of made-up pieces: prompts are token ids.
"""

import json
import re
import sys
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

KINDS = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}
WIDE = ("token_embd.weight", "output.weight")
"""Matrices that stay in 8 bits beside others in 4."""


def main() -> None:
    """Write one file."""
    folder, out, weights = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    kind = KINDS[weights]
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, config["model_type"].replace("_", ""))
    write_shape(writer, config, kind)
    write_vocabulary(writer, config["vocab_size"])
    write_tensors(writer, config, load_file(folder / "model.safetensors"), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_shape(writer: gguf.GGUFWriter, config: dict, kind: gguf.GGMLQuantizationType) -> None:
    """Return sizes, in GGUF's terms."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    if config["model_type"].startswith("qwen3"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{kind.name}"))


def write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Return unused pieces, in the simplest valid form."""
    pieces = [f"w{number}".encode() for number in range(size)]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([gguf.TokenType.CONTROL if number < 3 else gguf.TokenType.NORMAL for number in range(size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_tensors(
    writer: gguf.GGUFWriter, config: dict, tensors: dict[str, torch.Tensor], kind: gguf.GGMLQuantizationType
) -> None:
    """Return matrices as requested, vectors in fp32."""
    architectures = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "qwen3_moe": "QWEN3MOE"}
    arch = gguf.MODEL_ARCH[architectures[config["model_type"]]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in stacked_experts(tensors).items():
        part = name.split(".")[-2]
        if config["model_type"] == "llama" and part in heads:
            tensor = interleaved(tensor, heads[part])
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor.ndim == 1:
            writer.add_tensor(written, tensor.float().numpy())
        else:
            own = KINDS["int8"] if written in WIDE and kind == KINDS["int4"] else kind
            writer.add_tensor(written, gguf.quants.quantize(tensor.float().contiguous().numpy(), own), raw_dtype=own)


def stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with those of a layer's experts as one, in their order."""
    of_experts: dict[str, dict[int, torch.Tensor]] = {}
    others: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name):
            of_experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
        else:
            others[name] = tensor
    stacked = {name: torch.stack([each[e] for e in sorted(each)]) for name, each in of_experts.items()}
    return others | stacked


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder rows of a projection for llama.cpp's RoPE, which rotates adjacent pairs instead of halves."""
    rows, columns = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    main()
