"""Bodies of requests as clients send them: those of `vllm bench serve`, and each form of a prompt."""

import json
from typing import Any

import pytest

from tests.gateway.gateway_process import GatewayProcess, data_lines

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BENCH_CHAT: dict[str, Any] = {
    "model": "null",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "max_completion_tokens": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 40,
    "repetition_penalty": 1.1,
}
BENCH_COMPLETION: dict[str, Any] = {
    "model": "null",
    "prompt": "hello",
    "repetition_penalty": 1.0,
    "max_tokens": 5,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "ignore_eos": True,
}

pytestmark = pytest.mark.slow


def chunks_of(gateway: GatewayProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream that ends well."""
    with gateway.http() as http, http.stream("POST", path, json=body) as answer:
        *events, done = data_lines(answer.iter_lines())
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def text_of(gateway: GatewayProcess, path: str, **body: object) -> str:
    """The text of the first choice of a whole answer."""
    with gateway.http() as http:
        answer = http.post(path, json={"model": "null", "max_tokens": 9, "seed": 1, **body})
    [choice] = answer.json()["choices"]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


class TestGivenTheRequestsOfVllmBench:
    @pytest.mark.parametrize(("path", "body"), [(CHAT, BENCH_CHAT), (COMPLETIONS, BENCH_COMPLETION)])
    def test_when_one_is_streamed_then_the_last_chunk_counts_its_tokens(
        self, gateway: GatewayProcess, path: str, body: dict[str, Any]
    ) -> None:
        *chunks, last = chunks_of(gateway, path, body)

        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 5
        assert {chunk["usage"] for chunk in chunks} == {None}
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


class TestGivenTheFormsOfAPrompt:
    def test_when_content_is_a_list_of_texts_then_it_is_their_sum(self, gateway: GatewayProcess) -> None:
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]

        answers = [text_of(gateway, CHAT, messages=[{"role": "user", "content": one}]) for one in (parts, "hello")]

        assert answers[0] == answers[1]

    def test_when_a_prompt_is_token_ids_or_in_a_list_then_it_is_the_same(self, gateway: GatewayProcess) -> None:
        prompts = ["hello", ["hello"], list(b"hello"), [list(b"hello")]]

        answers = {text_of(gateway, COMPLETIONS, prompt=prompt, echo=False, best_of=1) for prompt in prompts}

        assert len(answers) == 1

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_when_seed_and_top_k_are_none_as_in_vllm_then_they_are_accepted(
        self, gateway: GatewayProcess, path: str
    ) -> None:
        prompt = {**BENCH_CHAT, **BENCH_COMPLETION, "seed": -1, "top_k": -1}

        assert chunks_of(gateway, path, prompt)

    def test_when_there_are_several_then_the_error_says_what_to_do(self, gateway: GatewayProcess) -> None:
        with gateway.http() as http:
            answer = http.post(COMPLETIONS, json={"prompt": ["a", "b"]})

        assert answer.status_code == 400
        assert "give each a request" in answer.json()["error"]["message"]

    def test_when_the_best_of_several_is_asked_for_then_it_is_refused(self, gateway: GatewayProcess) -> None:
        with gateway.http() as http:
            answer = http.post(COMPLETIONS, json={"prompt": "hello", "best_of": 3})

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")
