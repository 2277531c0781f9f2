"""Encoded bodies are byte for byte what the plain ones are as JSON."""

import json
from math import inf, nan
from typing import Literal

import pytest
from starlette.responses import JSONResponse

from sluice.gateway.openai.encoded_bodies import encoded, encoded_result
from sluice.protocol.openai_format.bodies import chat_body, completion_body
from sluice.protocol.openai_format.requests import CHAT, COMPLETIONS, ENDPOINTS
from sluice.protocol.wire import ChoiceResult, JobResult, TokenLogprobs, Usage

PLAIN = {CHAT: chat_body, COMPLETIONS: completion_body}
HOSTILE = '"choices":[],"logprobs":null,"logprob":0.0,\\"\u2028\n\N{GRINNING FACE}'
LOGPROBS = (
    TokenLogprobs(chosen=-0.5, top=((7, -0.5), (8, -inf)), token=b"\xf0\x9f", top_tokens=(b"\xf0\x9f", None), offset=4),
    TokenLogprobs(chosen=-1.25e-7, top=((1, -12.0),), token=HOSTILE.encode(), top_tokens=(HOSTILE.encode(),), offset=5),
    TokenLogprobs(chosen=-0.25, top=((9, -0.25), (8, -3.5))),
    TokenLogprobs(chosen=0.0, token=b"a\0", offset=6),
)


def result_of(*choices: ChoiceResult) -> JobResult:
    return JobResult(choices=choices, usage=Usage(prompt_tokens=3, output_tokens=8, cached_tokens=1), model=HOSTILE)


def choice(text: str = HOSTILE, logprobs: tuple[TokenLogprobs, ...] | None = LOGPROBS) -> ChoiceResult:
    return ChoiceResult(text=text, token_ids=(7, 2, 9, 4), finish_reason="stop", logprobs=logprobs)


class TestGivenResults:
    @pytest.mark.parametrize(
        "result",
        [
            result_of(),
            result_of(choice(logprobs=None)),
            result_of(choice(), choice("", ()), choice(logprobs=None), choice("other")),
        ],
        ids=["none", "plain", "several"],
    )
    @pytest.mark.parametrize("endpoint", ENDPOINTS)
    def test_when_one_is_encoded_then_it_is_the_plain_body(
        self, endpoint: Literal["/v1/chat/completions", "/v1/completions"], result: JobResult
    ) -> None:
        found = encoded_result(endpoint, "0.acme.x", result, HOSTILE)

        body = PLAIN[endpoint]("0.acme.x", result, HOSTILE) | {"created": json.loads(found)["created"]}
        assert found == JSONResponse(body).body
        assert found == encoded(body)

    @pytest.mark.parametrize("number", [nan, inf])
    def test_when_a_worker_sent_no_number_then_it_is_still_json(self, number: float) -> None:
        logprobs = (TokenLogprobs(chosen=number, top=((1, number),), token=b"a", top_tokens=(b"a",)),)

        found = encoded_result(CHAT, "0.acme.x", result_of(choice(logprobs=logprobs)), "m")

        [content] = json.loads(found)["choices"][0]["logprobs"]["content"]
        assert content["logprob"] == content["top_logprobs"][0]["logprob"] == -9999.0
