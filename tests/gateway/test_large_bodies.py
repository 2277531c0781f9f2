"""Bodies that are valid in size but would take long to parse or check: the gateway serves others on the same thread."""

import gc
import json
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from sluice.gateway.errors import HttpError
from sluice.gateway.requests import MAX_CONTAINERS, parse_json
from sluice.protocol.bounds import BODY_VALUES
from sluice.protocol.limits import MAX_MESSAGES
from sluice.protocol.openai_format.requests import CHAT, COMPLETIONS, Endpoint, RequestRefused, read_request

MAX_S = 1.0
"""Longest time for which a body may stop the loop; the slowest took a fifth of it on two cores."""


@contextmanager
def few_objects() -> Generator[None]:
    """Keep the garbage collector from what other tests left: a gateway has a small part of that."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class TestGivenABodyOfManyValues:
    @pytest.mark.parametrize(
        "body", [b"[" + b"[]," * MAX_CONTAINERS + b"0]", b"[" + b"1," * (BODY_VALUES.most + 1) + b"1]"]
    )
    def test_when_it_is_parsed_then_it_is_refused(self, body: bytes) -> None:
        with pytest.raises(HttpError, match="too many values"):
            parse_json(body)

    @pytest.mark.parametrize(
        "body", [b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"0]", b"[" + b"1," * (BODY_VALUES.most - 1) + b"1]"]
    )
    def test_when_it_has_as_many_as_may_be_then_it_is_parsed_soon(self, body: bytes) -> None:
        with few_objects():
            began_s = time.thread_time()
            parse_json(body)
            took_s = time.thread_time() - began_s

        assert took_s < MAX_S

    def test_when_its_messages_are_too_many_then_none_is_checked(self) -> None:
        with pytest.raises(RequestRefused, match="at most 10000 messages"):
            read_request(CHAT, {"messages": [{"role": "user"}] * (MAX_MESSAGES + 1)})

    @pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
    def test_when_its_biases_are_too_many_then_none_is_checked(self, endpoint: Endpoint) -> None:
        body = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}

        with pytest.raises(RequestRefused, match="at most 1024 tokens"):
            read_request(endpoint, body | {"logit_bias": {str(number): 1 for number in range(2000)}})


class TestGivenNumbersThatJsonDoesNotHave:
    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
    def test_when_they_are_parsed_then_they_are_refused(self, number: str) -> None:
        with pytest.raises(HttpError, match="is not valid JSON"):
            parse_json(f'{{"a": {number}}}'.encode())


class TestGivenEscapedText:
    @pytest.mark.parametrize("text", [r"\ud800", r"\uDFFF x", r"a\ud83dz"])
    def test_when_half_of_a_pair_is_missing_then_it_is_refused(self, text: str) -> None:
        with pytest.raises(HttpError, match="half of a surrogate pair"):
            parse_json(f'{{"a": "{text}"}}'.encode())

    def test_when_pairs_are_whole_then_it_is_read(self) -> None:
        assert parse_json(json.dumps({"a": "🙂é"}).encode()) == {"a": "🙂é"}
