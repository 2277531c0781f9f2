"""Random models of the shapes that engines are compared on, created once in a temporary folder.

`llama-100m`: 12 layers x 768, 12/4 heads, vocabulary 32,000 (125 M parameters with the embedding). `qwen2-500m`: the
shape of Qwen2 0.5 B, with its vocabulary of 151,936 and tied embeddings. `qwen3-600m`: that of Qwen3 0.6 B, with the
same vocabulary. `qwen3-moe-300m`: 12 layers x 768, each with 32 experts of 256, 4 of which compute a row (295 M
parameters with the embedding, 72 M of which compute a token). All bf16, with a tokenizer in which every token is a byte
or a word. `smollm2` is no random model: SmolLM2-135M-Instruct in bf16, see `tools.real_model`.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from tools.real_model.folder import real_model_folder

VOCAB_SIZE = 32_000
"""Prompts use ids below this, which both vocabularies have."""

SHAPES: Mapping[str, Mapping[str, object]] = {
    "llama-100m": {
        "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    },
    "qwen2-500m": {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "qwen3-600m": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
    "qwen3-moe-300m": {
        "model_type": "qwen3_moe", "vocab_size": VOCAB_SIZE, "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
        "max_position_embeddings": 4096, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
}  # fmt: skip

REAL = "smollm2"
NAMES = (*SHAPES, REAL)


def model_folder(shape: str = "llama-100m") -> Path:
    """Return the folder of a shape, creating it if necessary."""
    if shape == REAL:
        return real_model_folder(shape, "bfloat16")
    folder = Path(tempfile.gettempdir()) / f"sluice-benchmark-{shape}"
    if not (folder / "tokenizer.json").is_file():
        torch.manual_seed(0)
        save_random_model(SHAPES[shape], folder, torch.bfloat16)
        # Last: it marks the folder as complete.
        save_words(folder, int(str(SHAPES[shape]["vocab_size"])))
    return folder


def save_random_model(shape: Mapping[str, object], folder: Path, dtype: torch.dtype) -> None:
    """Write random weights of a shape, created on torch's default device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(shape)
    config = AutoConfig.for_model(str(options.pop("model_type")), **options)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def save_words(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer for random weights: every token is a byte or a word, as byte-level tokenizers have them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"Ġw{token_id}" for token_id in range(len(alphabet), vocab_size))][:vocab_size]
    tokenizer = Tokenizer(models.BPE({name: token_id for token_id, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
