"""How many bytes of text one token can stand for, where a tokenizer bounds that. Knows no limits of models."""

# The types of `tokenizers` are partial.
# pyright: reportUnknownMemberType=false

import json
from typing import Any, cast

from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

_NFC_SHRINKS_BY = 9
"""No text has more bytes of UTF-8 than this many times those of its NFC: 3 for each way of decomposition."""

_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Split")
"""Pre-tokenizers that keep all text, if their behavior is not `Removed`."""

_Step = dict[str, Any]
"""A step of a pipeline as JSON of the library."""


def max_token_bytes(backend: Backend) -> int | None:
    """Return the most bytes of UTF-8 text that one token can stand for; None if nothing bounds it.

    Only a byte-pair vocabulary with a token for every byte has a bound, and only if no earlier step drops text.
    """
    pieces, shrinks_by = _steps(backend.pre_tokenizer), _shrinks_by(_steps(backend.normalizer))
    keeps_all = all(step["type"] in _KEEPING and step.get("behavior") != "Removed" for step in pieces)
    takes_any = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    is_byte_level = any(step["type"] == "ByteLevel" for step in pieces)
    if shrinks_by is None or not keeps_all or takes_any or not _has_all_bytes(backend, is_byte_level=is_byte_level):
        return None
    # A token is written with at least one byte for each of its own.
    return shrinks_by * max(len(token.encode()) for token in backend.get_vocab(with_added_tokens=True))


def _has_all_bytes(backend: Backend, *, is_byte_level: bool) -> bool:
    """Return whether no text is dropped, or joined in one token for unknown text."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    names = pre_tokenizers.ByteLevel.alphabet() if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    has_bytes = all(backend.token_to_id(name) is not None for name in names)
    return has_bytes and (is_byte_level or bool(model.byte_fallback))


def _shrinks_by(steps: list[_Step]) -> int | None:
    """Return how many times shorter normalizers may make a text; None if that is not known."""
    factor = 1
    for step in steps:
        if step["type"] == "NFC":
            factor *= _NFC_SHRINKS_BY
        elif step["type"] != "Prepend" and not _replaces_spaces(step):
            return None
    return factor


def _replaces_spaces(step: _Step) -> bool:
    return step.get("pattern") == {"String": " "} and step.get("content") != ""


def _steps(stage: normalizers.Normalizer | pre_tokenizers.PreTokenizer | None) -> list[_Step]:
    """Return the steps of a stage, without the sequences around them."""
    if stage is None:
        return []
    # `__getstate__` gives the JSON of tokenizer.json, as bytes.
    return _flat(cast("_Step", json.loads(stage.__getstate__())))


def _flat(step: _Step) -> list[_Step]:
    inner = cast("list[_Step] | None", step.get("normalizers") or step.get("pretokenizers"))
    return [step] if inner is None else [one for part in inner for one in _flat(part)]
