"""Log-probabilities as JSON: with bytes of tokens, without them, and with what JSON lacks."""

import json
from math import inf

import pytest

from sluice.producer.contract.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    logprobs_from_json,
    logprobs_to_json,
)
from sluice.producer.contract.wire import TokenLogprobs

HALF = TokenLogprobs(
    chosen=-0.5, top=((7, -0.5), (8, -inf)), token=b"\xf0\x9f", top_tokens=(b"\xf0\x9f", None), offset=4
)
NUL = TokenLogprobs(chosen=-1.0, token=b"a\0", offset=5)
UNKNOWN = TokenLogprobs(chosen=-0.25, top=((9, -0.25),))


class TestGivenATokenThatIsHalfACharacter:
    def test_when_it_is_of_a_chat_then_its_bytes_are_exact(self) -> None:
        found = chat_logprobs([7], [HALF])

        half = {"token": "\N{REPLACEMENT CHARACTER}", "logprob": -0.5, "bytes": [0xF0, 0x9F]}
        unknown = {"token": "token_id:8", "logprob": -9999.0, "bytes": None}
        assert found == {"content": [{**half, "top_logprobs": [half, unknown]}], "refusal": None}

    def test_when_it_is_of_a_completion_then_the_likeliest_of_a_text_is_kept(self) -> None:
        other = TokenLogprobs(
            chosen=-3.0, top=((1, -0.5), (2, -1.5)), token=b"\x9f", top_tokens=(b"\xf0", b"a"), offset=0
        )

        found = completion_logprobs([3], [other])

        assert found == {
            "tokens": ["\N{REPLACEMENT CHARACTER}"],
            "token_logprobs": [-3.0],
            "top_logprobs": [{"\N{REPLACEMENT CHARACTER}": -0.5, "a": -1.5}],
            "text_offset": [0],
        }


class TestGivenATokenWhoseBytesAreUnknown:
    def test_when_they_are_formatted_then_ids_name_them(self) -> None:
        chat, completion = chat_logprobs([9], [UNKNOWN]), completion_logprobs([9, 7], [UNKNOWN, HALF])

        assert chat is not None
        assert completion is not None
        assert chat["content"][0]["token"] == "token_id:9"
        assert chat["content"][0]["bytes"] is None
        assert completion["tokens"] == ["token_id:9", "\N{REPLACEMENT CHARACTER}"]
        assert completion["text_offset"] is None

    def test_when_none_were_asked_for_then_there_are_none(self) -> None:
        assert (chat_logprobs([9], None), completion_logprobs([9], None)) == (None, None)
        assert (logprobs_to_json(None), logprobs_from_json(None)) == (None, None)


class TestGivenAnyLogprobs:
    @pytest.mark.parametrize("one", [HALF, NUL, UNKNOWN], ids=["half", "nul", "unknown"])
    def test_when_they_are_json_there_and_back_then_they_are_the_same(self, one: TokenLogprobs) -> None:
        written = json.loads(json.dumps(logprobs_to_json([one])))

        assert logprobs_from_json(written) == (one,)
        assert "\0" not in str(written)
