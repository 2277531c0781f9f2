"""Log-probabilities as JSON: with bytes of tokens, without them, and with what JSON lacks."""

import json
from math import inf

import pytest

from sluice.protocol.openai_format.logprobs import (
    chat_logprobs,
    completion_logprobs,
    logprobs_from_json,
    logprobs_to_json,
)
from sluice.protocol.wire import TokenLogprobs

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

    def test_when_it_is_of_a_completion_then_its_bytes_name_it(self) -> None:
        top = ((1, -0.5), (2, -1.5), (4, -2.0), (5, -2.5))
        parts = (b"\xf0", b"\xe2", b"B", "\N{REPLACEMENT CHARACTER}".encode())
        other = TokenLogprobs(chosen=-3.0, top=top, token=b"\x9f", top_tokens=parts, offset=0)

        found = completion_logprobs([3], [other])

        assert found == {
            "tokens": [r"bytes:\x9f"],
            "token_logprobs": [-3.0],
            "top_logprobs": [
                {
                    r"bytes:\xf0": -0.5,
                    r"bytes:\xe2": -1.5,
                    "B": -2.0,
                    "\N{REPLACEMENT CHARACTER}": -2.5,
                    r"bytes:\x9f": -3.0,
                }
            ],
            "text_offset": [0],
        }


class TestGivenTokensWithTheSameText:
    """As a piece of text and a byte may be."""

    def test_when_they_are_of_a_completion_then_each_is_there_and_the_chosen_one_has_its_name(self) -> None:
        top = ((1, -0.5), (2, -1.0), (3, -1.5))
        at = TokenLogprobs(chosen=-1.0, top=top, token=b"a", top_tokens=(b"a", b"a", b"b"), offset=0)

        found = completion_logprobs([2], [at])

        assert found is not None
        assert found["tokens"] == ["a"]
        assert found["top_logprobs"] == [{"token_id:1": -0.5, "a": -1.0, "b": -1.5}]


class TestGivenATokenWhoseBytesAreUnknown:
    def test_when_they_are_formatted_then_ids_name_them(self) -> None:
        chat, completion = chat_logprobs([9], [UNKNOWN]), completion_logprobs([9, 7], [UNKNOWN, HALF])

        assert chat is not None
        assert completion is not None
        assert chat["content"][0]["token"] == "token_id:9"
        assert chat["content"][0]["bytes"] is None
        assert completion["tokens"] == ["token_id:9", r"bytes:\xf0\x9f"]
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
