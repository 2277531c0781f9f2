"""The stock `openai` client, unmodified, against a gateway, a worker and a server that run as processes."""

import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk, ChatCompletionUserMessageParam

from sluice.producer import Producer
from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.servers import RedisServer

HELLO = [ChatCompletionUserMessageParam(role="user", content="hello")]

pytestmark = pytest.mark.slow


def text_of(chunks: list[ChatCompletionChunk], choice: int = 0) -> str:
    """The text of one choice."""
    parts = [part for chunk in chunks for part in chunk.choices if part.index == choice]
    return "".join(part.delta.content or "" for part in parts)


def counts_of(usage: CompletionUsage) -> tuple[int, int, int]:
    """Its tokens, without those found in the cache."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


class TestGivenAChat:
    def test_when_it_is_asked_for_whole_then_the_answer_is_that_of_the_queue(
        self, gateway: GatewayProcess, queue_server: RedisServer
    ) -> None:
        answer = gateway.client().chat.completions.create(model="null", messages=HELLO, max_tokens=20, seed=7)

        with Producer(queue_server.url) as producer:
            job = producer.submit(messages=[{"role": "user", "content": "hello"}], max_tokens=20, seed=7)
            assert answer.choices[0].message.content == producer.result(job).text
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 20

    @pytest.mark.parametrize("num_choices", [1, 3])
    def test_when_it_is_streamed_then_the_chunks_are_the_whole_answer(
        self, gateway: GatewayProcess, num_choices: int
    ) -> None:
        client = gateway.client()
        whole = client.chat.completions.create(model="null", messages=HELLO, max_tokens=20, seed=7, n=num_choices)

        chunks = list(
            client.chat.completions.create(
                model="null", messages=HELLO, max_tokens=20, seed=7, n=num_choices,
                stream=True, stream_options={"include_usage": True},
            )
        )  # fmt: skip

        for choice in whole.choices:
            assert text_of(chunks, choice.index) == choice.message.content
            parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
            assert parts[0].delta.role == "assistant"
            assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        # The second request finds the prompt of the first in the cache.
        assert counts_of(chunks[-1].usage) == counts_of(whole.usage)

    def test_when_no_worker_serves_its_model_then_the_error_names_those_served(self, gateway: GatewayProcess) -> None:
        with pytest.raises(openai.NotFoundError, match="served: null") as raised:
            gateway.client().chat.completions.create(model="gpt-9", messages=HELLO)

        assert raised.value.code == "model_not_found"
        assert raised.value.param == "model"

    @pytest.mark.parametrize("is_stream", [False, True])
    def test_when_the_prompt_is_too_long_for_the_model_then_it_is_400(
        self, gateway: GatewayProcess, *, is_stream: bool
    ) -> None:
        long = [ChatCompletionUserMessageParam(role="user", content="word " * 20_000)]

        with pytest.raises(openai.BadRequestError, match="tokens") as raised:
            gateway.client().chat.completions.create(model="null", messages=long, stream=is_stream)

        assert raised.value.code == "context_length_exceeded"


class TestGivenATextCompletion:
    def test_when_it_is_streamed_then_the_chunks_are_the_whole_answer(self, gateway: GatewayProcess) -> None:
        client = gateway.client()
        whole = client.completions.create(model="null", prompt="once", max_tokens=20, seed=3)

        chunks = list(client.completions.create(model="null", prompt="once", max_tokens=20, seed=3, stream=True))

        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text

    def test_when_models_are_listed_then_those_of_living_workers_are(self, gateway: GatewayProcess) -> None:
        assert [model.id for model in gateway.client().models.list()] == ["null"]

    def test_when_one_is_asked_for_then_it_is_shown_or_404(self, gateway: GatewayProcess) -> None:
        client = gateway.client()

        assert client.models.retrieve("null") == next(iter(client.models.list()))
        for name in ("gpt-9", "org/name"):
            with pytest.raises(openai.NotFoundError, match=f"'{name}' is not served; served: null") as raised:
                client.models.retrieve(name)
            assert raised.value.code == "model_not_found"


class TestGivenTwoWorkers:
    def test_when_the_one_that_streams_is_killed_then_each_character_comes_once(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        with worker_pool(valkey.url, tmp_path) as pool, gateway_process(valkey.url) as gateway:
            first, second = pool.start_all(2)
            second.signal(signal.SIGTSTP)
            second.wait_for_line("quiet")
            client = gateway.client()
            chunks: list[ChatCompletionChunk] = []
            stream = client.chat.completions.create(
                model="null", messages=HELLO, max_tokens=150, seed=5, stream=True, timeout=60
            )

            for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == 20:
                    second.signal(signal.SIGCONT)
                    first.signal_worker(signal.SIGKILL)

            whole = client.chat.completions.create(model="null", messages=HELLO, max_tokens=150, seed=5)
        assert text_of(chunks) == whole.choices[0].message.content


class TestGivenAClientThatLeaves:
    def test_when_it_has_read_a_part_then_its_job_is_cancelled(
        self, gateway: GatewayProcess, queue_server: RedisServer
    ) -> None:
        with Producer(queue_server.url) as producer:
            before = num_cancelled(producer)
            with gateway.client().chat.completions.create(**LONG, stream=True) as stream:
                next(iter(stream))

            wait_for_cancel(producer, before)

    def test_when_it_waits_for_the_whole_answer_then_its_job_is_cancelled(
        self, gateway: GatewayProcess, queue_server: RedisServer
    ) -> None:
        with Producer(queue_server.url) as producer:
            before = num_cancelled(producer)
            with pytest.raises(openai.APITimeoutError):
                gateway.client().chat.completions.create(**LONG, timeout=0.3)

            wait_for_cancel(producer, before)


class TestGivenAJobThatWaits:
    """No worker serves its queue."""

    @pytest.mark.parametrize("timeout_s", [0.3, 1.3])
    def test_when_the_client_of_its_stream_leaves_then_it_is_cancelled(
        self, valkey: RedisServer, timeout_s: float
    ) -> None:
        with gateway_process(valkey.url) as gateway, Producer(valkey.url) as producer:
            with pytest.raises(openai.APITimeoutError):
                list(gateway.client().chat.completions.create(**LONG, timeout=timeout_s, stream=True))

            wait_for_cancel(producer, 0)

    def test_when_it_is_cancelled_after_the_headers_then_its_stream_ends_with_an_error(
        self, valkey: RedisServer
    ) -> None:
        with gateway_process(valkey.url) as gateway, Producer(valkey.url) as producer:
            stream = gateway.client().chat.completions.create(**LONG, stream=True)
            producer.purge()

            with pytest.raises(openai.APIError, match="cancelled"):
                list(stream)


LONG: dict[str, Any] = {"model": "null", "messages": HELLO, "max_tokens": 4000}


def num_cancelled(producer: Producer) -> int:
    return producer.queue()[0].totals.get("cancelled", 0)


def wait_for_cancel(producer: Producer, before: int) -> None:
    deadline_s = time.monotonic() + 20
    while num_cancelled(producer) == before:
        assert time.monotonic() < deadline_s, "it was not cancelled"
        time.sleep(0.01)
