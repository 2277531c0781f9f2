"""Format log-probabilities as JSON: for OpenAI's responses, and in our own format. No I/O.

A token is shown as its text. As in OpenAI's API, a part of a character is U+FFFD in a chat, which also has the bytes,
and `bytes:\\xf0\\x9f` in a completion. An id that the tokenizer does not know is shown as `token_id:N`.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import inf
from typing import Any

from sluice.protocol.messages import TokenLogprobs

Object = dict[str, Any]  # Any: JSON, here and below

LEAST = -9999.0
"""Log-probability of an impossible token, as in OpenAI's API, because JSON has no infinity."""


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> Object | None:
    """Format the log-probabilities of a chat."""
    if logprobs is None:
        return None
    content = [
        {
            **chat_token(token_id, at.token, at.chosen),
            "top_logprobs": [chat_token(other, data, logprob) for other, data, logprob in top_of(at)],
        }
        for token_id, at in zip(token_ids, logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, *, is_echoed: bool = False
) -> Object | None:
    """Format the log-probabilities of a text completion. The chosen token is always among the top ones.

    The first token of an echoed prompt has none.
    """
    if logprobs is None:
        return None
    pairs = list(zip(token_ids, logprobs, strict=False))
    offsets = [at.offset for at in logprobs]
    unpredicted = [None] * is_echoed
    return {
        "tokens": [_name(token_id, at.token) for token_id, at in pairs],
        "token_logprobs": [*unpredicted, *(max(at.chosen, LEAST) for at in logprobs[len(unpredicted) :])],
        "top_logprobs": [*unpredicted, *(_by_name(token_id, at) for token_id, at in pairs[len(unpredicted) :])],
        "text_offset": None if None in offsets else offsets,
    }


def token_choices(token_id: int, at: TokenLogprobs) -> Object:
    """Format the log-probabilities at a token of a prompt by token id, as vLLM does: the token's, and the likeliest."""
    ranked: list[tuple[int, bytes | None, float, int | None]]
    ranked = [(*one, rank) for rank, one in enumerate(top_of(at), 1)]
    if all(token_id != other for other, *_ in ranked):
        ranked.append((token_id, at.token, at.chosen, None))
    return {
        str(other): {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": _shown(other, data)}
        for other, data, logprob, rank in ranked
    }


def logprobs_to_json(logprobs: Sequence[TokenLogprobs] | None) -> list[Object] | None:
    """Convert log-probabilities; a token becomes text, or a list of bytes if it is not valid UTF-8."""
    return None if logprobs is None else [_to_json(at) for at in logprobs]


def logprobs_from_json(written: Sequence[Mapping[str, Any]] | None) -> tuple[TokenLogprobs, ...] | None:
    """Reverse `logprobs_to_json`."""
    return None if written is None else tuple(_from_json(at) for at in written)


def chat_token(token_id: int, data: bytes | None, logprob: float) -> Object:
    """Format one token of a chat."""
    shown = _shown(token_id, data)
    return {"token": shown, "logprob": max(logprob, LEAST), "bytes": None if data is None else list(data)}


def _shown(token_id: int, data: bytes | None) -> str:
    return f"token_id:{token_id}" if data is None else data.decode(errors="replace")


def top_of(at: TokenLogprobs) -> list[tuple[int, bytes | None, float]]:
    """Return id, bytes (None if unknown) and log-probability of the most likely tokens."""
    return [(token_id, data, logprob) for (token_id, logprob), data in zip_longest(at.top, at.top_tokens)]


def _name(token_id: int, data: bytes | None) -> str:
    """Return the name of a token in a completion, which has no field for its bytes."""
    shown = _shown(token_id, data)
    if data is None or "\N{REPLACEMENT CHARACTER}" not in shown or shown.encode() == data:
        return shown
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _by_name(token_id: int, at: TokenLogprobs) -> dict[str, float]:
    """Return the top tokens by name. If two have the same name, the chosen token keeps it, else the more likely one."""
    named = {_name(token_id, at.token): token_id}
    by_name: dict[str, float] = {}
    for other, data, logprob in [*top_of(at), (token_id, at.token, at.chosen)]:
        name = _name(other, data)
        if named.setdefault(name, other) != other:
            name = f"token_id:{other}"
        by_name.setdefault(name, max(logprob, LEAST))
    return by_name


def _to_json(at: TokenLogprobs) -> Object:
    return {
        "chosen": _or_null(at.chosen),
        "top": [[token_id, _or_null(logprob)] for token_id, logprob in at.top],
        "token": _bytes_to_json(at.token),
        "top_tokens": [_bytes_to_json(data) for data in at.top_tokens],
        "offset": at.offset,
    }


def _bytes_to_json(data: bytes | None) -> str | list[int] | None:
    if data is None:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return list(data)
    # PostgreSQL cannot store NUL in text.
    return list(data) if "\0" in text else text


def _from_json(written: Mapping[str, Any]) -> TokenLogprobs:
    return TokenLogprobs(
        chosen=_number(written["chosen"]),
        top=tuple((token_id, _number(logprob)) for token_id, logprob in written["top"]),
        token=_bytes_from_json(written["token"]),
        top_tokens=tuple(_bytes_from_json(data) for data in written["top_tokens"]),
        offset=written["offset"],
    )


def _or_null(logprob: float) -> float | None:
    # That of an impossible token: JSON has no infinity.
    return None if logprob == -inf else logprob


def _number(written: float | None) -> float:
    return -inf if written is None else written


def _bytes_from_json(written: str | list[int] | None) -> bytes | None:
    if written is None:
        return None
    return written.encode() if isinstance(written, str) else bytes(written)
