"""How the model of a folder reads text, and when it ends: from its tokenizer, configs and chat template."""

from collections.abc import Mapping
from dataclasses import dataclass

from sluice.engine.models.folder import ModelFolder
from sluice.engine.text.tokenizer import Tokenizer, load_tokenizer
from sluice.protocol.wire import JobOptions
from sluice.worker.config import ModelConfig
from sluice.worker.model.chat_template import compile_template
from sluice.worker.model.end_tokens import end_tokens_of
from sluice.worker.model.loaded_model import ModelText
from sluice.worker.model.output_formats import output_format_of
from sluice.worker.model.pooling import read_pooling
from sluice.worker.model.sampling_defaults import NOTHING_STATED, read_defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderText:
    """The text side of a model folder."""

    text: ModelText
    tokenizer: Tokenizer
    end_token_ids: frozenset[int]
    description: str
    """The folder, for people."""


def read_text(model: ModelConfig, folder: ModelFolder, *, vocab_size: int) -> FolderText:
    """Read the text side of a folder.

    Raises:
        ModelFolderError: a file is missing or wrong, or the model has no embedding for a token that it names.
    """
    tokenizer = load_tokenizer(folder.path)
    facts = tokenizer.facts
    template = compile_template(facts.chat_template, facts.special_tokens) if facts.chat_template else None
    ends = end_tokens_of(folder, tokenizer, template, vocab_size=vocab_size)
    output_format = output_format_of(template, model)
    text = ModelText(
        tokenizer=tokenizer,
        output_format=output_format,
        mark_ids=tokenizer.special_ids_of(output_format.marks),
        template=template,
        end_tokens=tuple(f"{tokenizer.token(end)} ({end}: {', '.join(names)})" for end, names in ends.items()),
        defaults=_defaults_of(model, folder.generation_config),
        encode_pair=tokenizer.encode_pair,
        embed=read_pooling(folder.path, None if model.pooling == "auto" else model.pooling),
    )
    family, chat = folder.config.get("model_type", "unknown"), "with" if template else "without"
    written = f", writes {output_format}" if str(output_format) else ""
    weights = f", {folder.weights.description}" if folder.weights.description else ""
    return FolderText(
        text=text,
        tokenizer=tokenizer,
        end_token_ids=frozenset(ends),
        description=f"{folder.path}: {family}, vocabulary of {tokenizer.vocab_size} tokens, {chat} chat template"
        f"{written}{weights}",
    )


def _defaults_of(model: ModelConfig, generation_config: Mapping[str, object]) -> JobOptions:
    return read_defaults(generation_config) if model.generation_config == "auto" else NOTHING_STATED
