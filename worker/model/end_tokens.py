"""The tokens that end an output: which parts of a model folder name each.

As vLLM does, they are those of generation_config.json (else config.json) and the tokenizer's own. The chat template's
joins them: a fine-tune may end its answers with `<|im_end|>` while all its configs still name the base model's end. A
family may have more (`Family.end_tokens`): gpt-oss ends a call of a tool with `<|call|>`, which its GGUFs do not name.
"""

from sluice.engine.errors import ModelFolderError
from sluice.engine.models.families import FAMILIES
from sluice.engine.models.folder import ModelFolder
from sluice.engine.text.tokenizer import Tokenizer
from sluice.worker.model.chat_template import ChatTemplate


def end_tokens_of(
    folder: ModelFolder, tokenizer: Tokenizer, template: ChatTemplate | None, *, vocab_size: int
) -> dict[int, tuple[str, ...]]:
    """Return the end tokens of a folder, each with the parts that name it: configs, tokenizer, chat template, family.

    Raises:
        ModelFolderError: the model has no embedding for an end token, or for one that the template writes.
    """
    of_tokenizer = tokenizer.facts.eos_token_id
    if of_tokenizer is not None and of_tokenizer >= vocab_size:
        raise _without_embedding("its eos_token is", of_tokenizer, tokenizer, vocab_size)
    after_answer = ""
    if template is not None:
        after_answer = template.text_after_answer()
        written = max(tokenizer.encode(template.probe, add_special_tokens=False), default=0)
        if written >= vocab_size:
            raise _without_embedding("its chat template writes", written, tokenizer, vocab_size)
    named = (
        *((token_id, folder.eos_source) for token_id in sorted(folder.eos_token_ids(vocab_size))),
        (of_tokenizer, "tokenizer"),
        (tokenizer.added_token_at_start(after_answer), "chat template"),
        *((token_id, "family") for token_id in _of_family(folder, tokenizer) if token_id < vocab_size),
    )
    sources: dict[int, tuple[str, ...]] = {}
    for token_id, name in named:
        if token_id is not None:
            sources[token_id] = (*sources.get(token_id, ()), name)
    return sources


def _of_family(folder: ModelFolder, tokenizer: Tokenizer) -> list[int]:
    """Return the end tokens of the folder's family; an engine that is not ours may know other families."""
    family = FAMILIES.get(str(folder.config.get("model_type")))
    return [] if family is None else sorted(tokenizer.special_ids_of(family.end_tokens).values())


def _without_embedding(what: str, token_id: int, tokenizer: Tokenizer, vocab_size: int) -> ModelFolderError:
    return ModelFolderError(
        f"{what} {tokenizer.token(token_id)!r}, which is token {token_id}, and the model in its config.json knows "
        f"{vocab_size} tokens: correct the files of the tokenizer, or resize the model's embeddings."
    )
