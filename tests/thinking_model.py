"""A tiny random model whose chat template has `<think>`, as those of models that reason have it.

Each printable ASCII character is a token, and each mark. So a random model ends its reasoning after about a hundred
tokens, sooner or later with `logit_bias`.
"""

# The types of `tokenizers` are partial.
# pyright: reportUnknownMemberType=false

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.oracles.tiny_models import TinyModel

END, THOUGHT = 1, 4
"""Ids of the token that ends an output, and of `</think>`."""

_MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_NUM_SPECIAL = 3
"""The first marks are special tokens. Those of reasoning and calls are not, as in Qwen3, unless a test wants it."""

_TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
OPENED = "<think>\n"
"""What templates of models that always reason add at the end of a prompt."""


def thinking_model(folder: Path, *, is_opened: bool, has_special_marks: bool = False) -> Path:
    """Make the model, and return its folder.

    Args:
        folder: Where.
        is_opened: Whether the template begins the reasoning. Otherwise the model does, or does not.
        has_special_marks: Whether all marks are special tokens.
    """
    alphabet = dict.fromkeys([*map(chr, range(0x21, 0x7F)), "Ġ", "Ċ"])
    vocabulary = {token: number for number, token in enumerate([*_MARKS, *alphabet])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    num_special = len(_MARKS) if has_special_marks else _NUM_SPECIAL
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in _MARKS[:num_special]])
    backend.add_tokens([AddedToken(mark, special=False) for mark in _MARKS[num_special:]])
    sizes = {"vocab_size": len(vocabulary), "max_position_embeddings": 2048, "initializer_range": 0.1}
    TinyModel("qwen3", sizes).save(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(_TEMPLATE + (OPENED if is_opened else ""))
    return folder
