"""Tokens that the files beside tokenizer.json declare, merged into it as transformers does. Knows no text.

A fine-tune may declare its markers in tokenizer_config.json, special_tokens_map.json or added_tokens.json only. Without
them a chat's markers would be encoded in pieces, and its end token would end nothing.

The order is that of transformers 5:
- tokenizer.json is the base: a token that it has keeps its id.
- `added_tokens_decoder` of tokenizer_config.json, where it exists, replaces the two older files. It brings tokens that
  the base lacks, and its flags count for those that the base has.
- Otherwise special_tokens_map.json overrides the names of tokenizer_config.json, and added_tokens.json brings tokens.
- Tokens with a name, such as `eos_token`, and those of `extra_special_tokens` (or `additional_special_tokens`) come
  last, where they are missing.
- A class of transformers that the folder names brings names of its own, and makes all named tokens special.

A new token that is in the vocabulary keeps its id there; any other gets the next free one, in order of the declared
ids.
"""

# The types of `tokenizers` are partial.
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel

from sluice.engine.errors import ModelFolderError
from sluice.engine.text.json_files import Json, read_json

_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
"""The fields of tokens without a name. Only one counts, the first that is not empty."""


@dataclass(frozen=True, slots=True)
class _TokenizerClass:
    """What a class of transformers says of tokens, besides the files of a folder."""

    names: Mapping[str, str]
    """Named tokens, if a folder does not state them and its tokenizer.json has them."""

    is_plain: bool = False
    """Whether special tokens lose their other flags."""


_CLASSES = {
    "GemmaTokenizer": _TokenizerClass(
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        }
    ),
    "LlamaTokenizer": _TokenizerClass({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "Qwen2Tokenizer": _TokenizerClass(
        dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"), is_plain=True
    ),
}
_CLASS_OF_MODELS = {
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
}
"""The class of a folder that names none, by model_type."""

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTokens:
    """What the files beside tokenizer.json declare."""

    added: Mapping[int, AddedToken]
    """By declared id: those of `added_tokens_decoder`, else of added_tokens.json."""

    is_complete: bool
    """Whether `added` is `added_tokens_decoder`."""

    named: Mapping[str, AddedToken]
    """By name, such as `eos_token` or a model's own `image_token`."""

    extra: tuple[AddedToken, ...]
    """Special tokens without a name."""

    splits_special: bool
    """Whether special tokens in a text are encoded in pieces."""

    kind: _TokenizerClass | None
    """The class that the folder names, if that says anything."""


def read_declared(folder: Path, backend: Backend) -> DeclaredTokens:
    """Read what a model folder declares beside its tokenizer.json, which is `backend`.

    Raises:
        ModelFolderError: a file is corrupt, or a declaration has another form.
    """
    config = read_json(folder / _CONFIG)
    # Read also where they are not used: a corrupt file is reported in any case.
    older_files = read_json(folder / _MAP), read_json(folder / _ADDED)
    is_complete = "added_tokens_decoder" in config
    nothing: Json = {}
    older, older_added = (nothing, nothing) if is_complete else older_files
    kind = _class_of(config, read_json(folder / "config.json"), backend)
    named, extra = _named(_with_defaults(config, kind, backend), older), _extra(config, older)
    # transformers leaves out those that special_tokens_map.json calls additional.
    special = {token.content for token in (*named.values(), *_extra(config, {**older, _EXTRA[1]: None}))}
    return DeclaredTokens(
        added=_decoder(config) if is_complete else _older_added(older_added, special),
        is_complete=is_complete,
        named=named,
        extra=extra,
        splits_special=_switch(config, "split_special_tokens"),
        kind=kind,
    )


def merge(declared: DeclaredTokens, backend: Backend) -> None:
    """Add to `backend` the tokens that it lacks, and replace the flags of those that differ."""
    present = backend.get_added_tokens_decoder()
    names = {token.content for token in declared.named.values()}
    # Of the older files, a token that claims the id of one in tokenizer.json does not count.
    added = dict(declared.added) if declared.is_complete else {**declared.added, **present}
    new = [_as_special(token) if token.content in names else token for _, token in sorted(added.items())]
    contents = {token.content for token in (*present.values(), *new)}
    for token in (*map(_as_special, declared.named.values()), *declared.extra):
        if token.content not in contents:
            contents.add(token.content)
            new.append(token)
    backend.add_tokens(new)
    if declared.kind is not None:
        backend.add_tokens(_made_special(declared, declared.kind, backend))
    backend.encode_special_tokens = declared.splits_special


def _made_special(declared: DeclaredTokens, kind: _TokenizerClass, backend: Backend) -> list[AddedToken]:
    """Return the tokens that a class makes special."""
    names = {token.content for token in declared.named.values()}
    if kind.is_plain:
        return [AddedToken(content, special=True) for content in names | {token.content for token in declared.extra}]
    present = backend.get_added_tokens_decoder().values()
    return [_as_special(token) for token in present if token.content in names and not token.special]


def _class_of(config: Json, model_config: Json, backend: Backend) -> _TokenizerClass | None:
    model_type = str(model_config.get("model_type"))
    stated = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    # transformers takes no other class for this type, since many of its folders name a wrong one.
    name = (
        str(stated).removesuffix("Fast") if stated and model_type != "qwen2" else _CLASS_OF_MODELS.get(model_type, "")
    )
    # It does the same with folders of Llama 3 that name Llama 2's class.
    return None if name == "LlamaTokenizer" and isinstance(backend.decoder, ByteLevel) else _CLASSES.get(name)


def _with_defaults(config: Json, kind: _TokenizerClass | None, backend: Backend) -> Json:
    """Return a config with the names that it does not state, from tokenizer.json or the class."""
    names: dict[str, object] = {}
    if backend.padding is not None:
        names["pad_token"] = backend.padding["pad_token"]
    if kind is not None:
        names |= {name: token for name, token in kind.names.items() if backend.token_to_id(token) is not None}
    return {**names, **config}


def _as_special(token: AddedToken) -> AddedToken:
    # A new object with the same flags would not do: whether normalization was stated cannot be read.
    token.special = True
    return token


def _decoder(config: Json) -> dict[int, AddedToken]:
    field = f"{_CONFIG}: added_tokens_decoder"
    tokens: dict[int, AddedToken] = {}
    for token_id, token in _object(config["added_tokens_decoder"], field).items():
        if not token_id.isascii() or not token_id.isdigit():
            raise ModelFolderError(f"{field} must have token ids as its keys, got {token_id!r}.")
        tokens[int(token_id)] = _token_object(token, f"{field}.{token_id}")
    return tokens


def _older_added(added: Json, special: set[str]) -> dict[int, AddedToken]:
    tokens: dict[int, AddedToken] = {}
    for content, token_id in added.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ModelFolderError(f"{_ADDED}: {content} must have a token id of 0 or more, got {token_id!r}.")
        is_special = content in special
        tokens[token_id] = AddedToken(content, normalized=not is_special, special=is_special)
    return tokens


def _named(config: Json, older: Json) -> dict[str, AddedToken]:
    """Return the named tokens: first those with common names, then the model's own."""
    stated: Json = {**config, **older}
    own = [name for name, value in stated.items() if name not in _NAMES and _is_own_name(name, value)]
    # A model's own names may also be an object in the field of extra tokens.
    values = {name: stated.get(name) for name in (*_NAMES, *own)} | _named_extra(config) | _named_extra(older)
    return {
        name: _token(value, f"{_MAP if name in older else _CONFIG}: {name}")
        for name, value in values.items()
        if value is not None
    }


def _named_extra(settings: Json) -> dict[str, object]:
    extra = next((settings[field] for field in _EXTRA if settings.get(field)), None)
    return cast("dict[str, object]", extra) if isinstance(extra, dict) else {}


def _is_own_name(name: str, value: object) -> bool:
    if not name.endswith("_token"):
        return False
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _extra(config: Json, older: Json) -> tuple[AddedToken, ...]:
    """Return the tokens without a name."""
    own = _listed(config, _CONFIG, *_EXTRA)
    return own + _listed(older, _MAP, *(_EXTRA[:1] if own else _EXTRA))


def _listed(settings: Json, file: str, *fields: str) -> tuple[AddedToken, ...]:
    """Return the tokens of the first of these fields that lists any."""
    for field in fields:
        value = settings.get(field)
        if not isinstance(value, list | dict | None):
            raise ModelFolderError(
                f"{file}: {field} must be a list of tokens, or an object of named ones, got {value!r}."
            )
        if value and isinstance(value, list):
            return tuple(_token(token, f"{file}: {field}") for token in cast("list[object]", value))
    return ()


def _switch(config: Json, field: str) -> bool:
    value = config.get(field)
    if not isinstance(value, bool | None):
        raise ModelFolderError(f"{_CONFIG}: {field} must be true or false, got {value!r}.")
    return value is True


def _object(value: object, field: str) -> Json:
    if not isinstance(value, dict):
        raise ModelFolderError(f"{field} must be an object, got {value!r}.")
    return cast("Json", value)


def _token(value: object, field: str) -> AddedToken:
    """Return a special token, which is written as a string or as an object."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if not isinstance(value, dict) or not isinstance(cast("Json", value).get("content"), str):
        raise ModelFolderError(f"{field} must be a token, as a string or an object with content, got {value!r}.")
    token = cast("Json", value)
    # With this mark the flags are complete; without it the token is special.
    return _token_object(token if token.get("__type") == "AddedToken" else {**token, "special": True}, field)


def _token_object(value: object, field: str) -> AddedToken:
    """Return a token with its flags."""
    token = _object(value, field)
    content = token.get("content")
    if not isinstance(content, str):
        raise ModelFolderError(f"{field}.content must be text, got {content!r}.")
    flags = {flag: token[flag] for flag in _FLAGS if token.get(flag) is not None}
    wrong = next((flag for flag, is_set in flags.items() if not isinstance(is_set, bool)), None)
    if wrong is not None:
        raise ModelFolderError(f"{field}.{wrong} must be true or false, got {flags[wrong]!r}.")
    return AddedToken(content, **cast("dict[str, bool]", flags))
