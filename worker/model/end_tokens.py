"""The tokens that end an output: which parts of a model folder name each.

As vLLM does, they are those of generation_config.json (else config.json) and the tokenizer's own. The chat template's
joins them: a fine-tune may end its answers with `<|im_end|>` while all its configs still name the base model's end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sluice.engine.models.folder import ModelFolder
from sluice.engine.text.tokenizer import Tokenizer
from sluice.worker.model.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class EndTokens:
    """End tokens and their sources."""

    sources: Mapping[int, tuple[str, ...]]
    """By token id: which parts of the folder name it."""

    @property
    def ids(self) -> frozenset[int]:
        """The ids."""
        return frozenset(self.sources)

    def described(self, tokenizer: Tokenizer) -> list[str]:
        """Return a line for each, such as `<|im_end|> (2: tokenizer, chat template)`."""
        return [
            f"{tokenizer.token(token_id)} ({token_id}: {', '.join(names)})" for token_id, names in self.sources.items()
        ]


def end_tokens_of(folder: ModelFolder, tokenizer: Tokenizer, template: ChatTemplate | None) -> EndTokens:
    """Merge the end tokens of a folder's configs, its tokenizer and its chat template."""
    after_answer = "" if template is None else template.text_after_answer()
    named = (
        *((token_id, folder.eos_source) for token_id in sorted(folder.eos_token_ids)),
        (tokenizer.facts.eos_token_id, "tokenizer"),
        (tokenizer.added_token_at_start(after_answer), "chat template"),
    )
    sources: dict[int, tuple[str, ...]] = {}
    for token_id, name in named:
        if token_id is not None:
            sources[token_id] = (*sources.get(token_id, ()), name)
    return EndTokens(sources)
