"""Encode the bodies of responses as JSON, choice by choice. No I/O.

One call of Python's encoder blocks all other threads. Most of a large body is the log-probabilities of a chat: for
each token up to 20 others. The JSON around each number is encoded once per token.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

from sluice.protocol.openai_format.bodies import Object, chat_body, completion_body, echoed, is_echoed
from sluice.protocol.openai_format.logprobs import LEAST, chat_token, completion_logprobs, top_of
from sluice.protocol.openai_format.requests import CHAT, Endpoint
from sluice.protocol.wire import ChoiceResult, JobResult

# Quotes inside a text are escaped, so these match names only.
CHOICES, LOGPROBS, LOGPROB = '"choices":[', '"logprobs":', '"logprob":'


def encoded_result(endpoint: Endpoint, name: str, result: JobResult, model: str) -> bytes:
    """Encode `chat_body` or `completion_body`."""
    result = echoed(result)
    bare = replace(result, choices=tuple(replace(choice, logprobs=None) for choice in result.choices))
    body = (chat_body if endpoint == CHAT else completion_body)(name, bare, model)
    logprobs = _ChatTokens().logprobs if endpoint == CHAT else _completion_logprobs
    pairs = zip(body["choices"], result.choices, strict=True)
    return _with_choices(body, (_with_logprobs(_json(plain), choice, logprobs) for plain, choice in pairs))


def encoded(body: Object) -> bytes:
    """Encode any body with choices."""
    return _with_choices(body, map(_json, body["choices"]))


def _with_choices(body: Object, choices: Iterable[str]) -> bytes:
    before, name, after = _json({**body, "choices": []}).partition(CHOICES)
    return "".join((before, name, ",".join(choices), after)).encode()


def _with_logprobs(plain: str, choice: ChoiceResult, logprobs: Callable[[ChoiceResult], str]) -> str:
    if choice.logprobs is None:
        return plain
    before, name, after = plain.partition(LOGPROBS)
    return "".join((before, name, logprobs(choice), after.removeprefix("null")))


def _completion_logprobs(choice: ChoiceResult) -> str:
    return _json(completion_logprobs(choice.token_ids, choice.logprobs, is_echoed=is_echoed(choice)))


class _ChatTokens(dict[int | bytes, tuple[str, str]]):
    """The JSON before and after a token's log-probability, by the token's bytes, or by its id if they are unknown."""

    def __missing__(self, key: int | bytes) -> tuple[str, str]:
        token = chat_token(key, None, 0.0) if isinstance(key, int) else chat_token(0, key, 0.0)
        before, name, after = _json(token).partition(LOGPROB)
        pair = self[key] = before + name, after.removeprefix("0.0").removesuffix("}")
        return pair

    def logprobs(self, choice: ChoiceResult) -> str:
        """Encode the log-probabilities of a choice as `chat_logprobs` formats them."""
        content: list[str] = []
        for token_id, at in zip(choice.token_ids, choice.logprobs or (), strict=False):
            others = [
                f"{(around := self[other if data is None else data])[0]}{_number(logprob)}{around[1]}}}"
                for other, data, logprob in top_of(at)
            ]
            before, after = self[token_id if at.token is None else at.token]
            content.append(f'{before}{_number(at.chosen)}{after},"top_logprobs":[{",".join(others)}]}}')
        return f'{{"content":[{",".join(content)}],"refusal":null}}'


def _number(logprob: float) -> str:
    return repr(logprob if LEAST < logprob < inf else LEAST)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
