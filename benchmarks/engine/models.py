"""Random models of the shapes that engines are compared on, created once in a temporary folder.

`llama-100m`: 12 layers x 768, 12/4 heads, vocabulary 32,000. `llama-11m`: 4 layers x 256 with the same vocabulary, as
a draft model. `qwen2-500m`: the shape of Qwen2 0.5 B, with its vocabulary of 151,936 and tied embeddings. All bf16,
with a tokenizer in which every token is a word.
"""

# torch's and transformers' types are partial.
# pyright: reportUnknownMemberType=false

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.service.words import save_words


def make_llama(folder: Path) -> None:
    """100 M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=4096,
    )  # fmt: skip
    torch.nn.Module.to(model := LlamaForCausalLM(config), torch.bfloat16)
    model.save_pretrained(folder)


def make_qwen2(folder: Path) -> None:
    """500 M parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    torch.nn.Module.to(model := Qwen2ForCausalLM(config), torch.bfloat16)
    model.save_pretrained(folder)


def make_draft(folder: Path) -> None:
    """11 M parameters, with the vocabulary of the 100 M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    torch.nn.Module.to(model := LlamaForCausalLM(config), torch.bfloat16)
    model.save_pretrained(folder)


SHAPES: Mapping[str, Callable[[Path], None]] = {
    "llama-100m": make_llama,
    "qwen2-500m": make_qwen2,
    "llama-11m": make_draft,
}
VOCAB_SIZE = 32_000
"""Prompts use ids below this, which both vocabularies have."""


def model_folder(shape: str) -> Path:
    """Return the folder of a shape, creating it if necessary."""
    folder = Path(tempfile.gettempdir()) / f"sluice-benchmark-{shape}"
    if not (folder / "tokenizer.json").is_file():
        torch.manual_seed(0)
        SHAPES[shape](folder)
        vocab_size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
        # Last: it marks the folder as complete.
        save_words(folder, vocab_size)
    return folder
