"""Log-probabilities as clients of OpenAI's API see them: text, bytes and places of tokens."""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from openai import OpenAI
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionTokenLogprob,
    ChatCompletionUserMessageParam,
)

from sluice.engine.text.tokenizer import load_tokenizer
from sluice.producer import JobId, Producer
from tests.end_to_end.processes import ROOT, worker_pool
from tests.gateway.gateway_process import GatewayProcess, data_lines, gateway_process
from tests.servers import RedisServer

HELLO = [ChatCompletionUserMessageParam(role="user", content="hello")]
FOLDER = ROOT / "worker" / "small_model"

pytestmark = pytest.mark.slow


def joined(tokens: Sequence[ChatCompletionTokenLogprob]) -> bytes:
    """The bytes of all tokens."""
    return b"".join(bytes(one.bytes or ()) for one in tokens)


def tokens_of(chunks: Sequence[ChatCompletionChunk], choice: int = 0) -> list[ChatCompletionTokenLogprob]:
    """The tokens of one choice of a stream."""
    parts = [part for chunk in chunks for part in chunk.choices if part.index == choice]
    return [one for part in parts if part.logprobs for one in part.logprobs.content or ()]


def answer_to(client: OpenAI, asked: Mapping[str, Any]) -> ChatCompletion:
    """The whole answer."""
    # The type of an answer depends on options that the type checker does not see.
    return cast("ChatCompletion", client.chat.completions.create(**asked))


def chunks_of(client: OpenAI, asked: Mapping[str, Any]) -> Iterator[ChatCompletionChunk]:
    """The same as a stream."""
    yield from client.chat.completions.create(**asked, stream=True)


class TestGivenAChatWithLogprobs:
    def test_when_it_is_large_then_each_choice_has_all_of_its_tokens(self, gateway: GatewayProcess) -> None:
        answer = gateway.client().chat.completions.create(
            model="null", messages=HELLO, max_tokens=50, n=16, logprobs=True, top_logprobs=20, seed=1
        )

        contents = [choice.logprobs.content or [] for choice in answer.choices if choice.logprobs is not None]
        assert [joined(content).decode() for content in contents] == [one.message.content for one in answer.choices]
        assert {len(one.top_logprobs) for content in contents for one in content} == {20}

    def test_when_it_is_whole_then_its_tokens_are_its_text(self, gateway: GatewayProcess) -> None:
        answer = gateway.client().chat.completions.create(
            model="null", messages=HELLO, max_tokens=20, n=2, logprobs=True, top_logprobs=3
        )

        for choice in answer.choices:
            assert choice.logprobs is not None
            content = choice.logprobs.content or []
            assert "".join(one.token for one in content) == choice.message.content
            assert joined(content).decode() == choice.message.content
            assert {len(one.top_logprobs) for one in content} == {3}
            assert [one.token for one in content[0].top_logprobs] == [" ", "e", "t"]

    def test_when_it_is_streamed_then_the_tokens_are_those_of_the_whole_answer(self, gateway: GatewayProcess) -> None:
        client = gateway.client()
        asked: dict[str, Any] = {
            "model": "null",
            "messages": HELLO,
            "max_tokens": 20,
            "n": 2,
            "seed": 3,
            "logprobs": True,
        }
        whole = answer_to(client, asked)

        chunks = list(chunks_of(client, asked))

        for choice in whole.choices:
            assert choice.logprobs is not None
            assert tokens_of(chunks, choice.index) == choice.logprobs.content


class TestGivenACompletionWithLogprobs:
    def test_when_it_is_whole_then_each_offset_is_where_its_token_begins(self, gateway: GatewayProcess) -> None:
        answer = gateway.client().completions.create(model="null", prompt="x", max_tokens=20, logprobs=2)

        [choice] = answer.choices
        found = choice.logprobs
        assert found is not None
        assert found.tokens is not None
        assert found.text_offset is not None
        assert "".join(found.tokens) == choice.text
        assert [choice.text[at] for at in found.text_offset] == found.tokens
        assert found.top_logprobs is not None
        assert all(token in top for top, token in zip(found.top_logprobs, found.tokens, strict=True))

    def test_when_it_is_streamed_then_offsets_count_from_the_beginning(self, gateway: GatewayProcess) -> None:
        body = {"model": "null", "prompt": "x", "max_tokens": 20, "logprobs": 0, "stream": True}

        with gateway.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            *events, done = data_lines(answer.iter_lines())

        parts = [choice for event in events for choice in json.loads(event)["choices"] if choice["logprobs"]]
        offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
        assert (offsets, done) == (list(range(20)), "[DONE]")


@pytest.mark.long
class TestGivenTwoWorkersWithARealModel:
    def test_when_the_one_that_streams_is_killed_then_bytes_and_text_are_one(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        asked: dict[str, Any] = {
            "model": "small_model", "messages": HELLO, "max_tokens": 300, "seed": 5, "logprobs": True,
            "top_logprobs": 3, "temperature": 2.5, "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        with worker_pool(valkey.url, tmp_path) as pool, gateway_process(valkey.url) as gateway:
            first, second = pool.start_all(2, MODEL=str(FOLDER))
            second.signal(signal.SIGTSTP)
            second.wait_for_line("quiet")
            client = gateway.client()
            chunks: list[ChatCompletionChunk] = []

            for chunk in chunks_of(client, asked):
                chunks.append(chunk)
                if len(chunks) == 5:
                    second.signal(signal.SIGCONT)
                    first.signal_worker(signal.SIGKILL)

            whole = answer_to(client, asked)
            with Producer(valkey.url) as producer:
                assert producer.status(JobId(chunks[0].id.removeprefix("chatcmpl-"))).attempt == 2
        text = "".join(part.delta.content or "" for chunk in chunks for part in chunk.choices)
        tokens = tokens_of(chunks)
        [choice] = whole.choices
        assert choice.logprobs is not None
        assert (len(tokens), text) == (300, choice.message.content)
        assert [one.bytes for one in tokens] == [one.bytes for one in choice.logprobs.content or ()]
        special = load_tokenizer(FOLDER).facts.special_tokens.values()
        shown = b"".join(bytes(one.bytes or ()) for one in tokens if one.token not in special)
        assert shown.decode(errors="replace") == text
