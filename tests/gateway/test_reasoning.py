"""Reasoning through a gateway: apart from answers and calls, in chats and responses, and through a SIGKILL amid it."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, cast

import openai
import pytest

from sluice.history.database import open_database
from sluice.producer import Producer, Receipt
from sluice.protocol.wire import ChoiceResult
from sluice.worker.recorder.migrate import migrate
from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.grids import fast_only
from tests.servers import RedisServer, redis_server
from tests.thinking_model import END, THOUGHT, thinking_model

ASK: Any = [{"role": "user", "content": "Hi"}]
BIAS = {THOUGHT: 1.0, END: -4.0}
"""Thoughts of about fifty tokens, and answers that seldom end before `max_tokens`."""

LONG = {THOUGHT: -2.0, END: -4.0}
"""Thoughts of several hundred tokens."""

TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "maxProperties": 0}}}]

pytestmark = pytest.mark.slow


def migrated(folder: Path) -> str:
    """A database for responses."""
    url = f"sqlite:///{folder / 'responses.db'}"
    engine = open_database(url, is_writer=True)
    migrate(engine)
    engine.dispose()
    return url


@pytest.fixture(scope="module")
def server() -> Generator[RedisServer]:
    with redis_server("valkey") as made:
        yield made


@pytest.fixture(scope="module", params=fast_only(["plain"], ["special"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template begins the thoughts; its marks are plain tokens, as Qwen3's, or special ones."""
    folder = tmp_path_factory.mktemp("models") / f"thinker-{request.param}"
    return thinking_model(folder, is_opened=True, has_special_marks=request.param == "special")


@pytest.fixture(scope="module")
def gateway(server: RedisServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    """A gateway of a worker with it."""
    folder = tmp_path_factory.mktemp("reasoning")
    with worker_pool(server.url, folder) as pool, gateway_process(server.url, database_url=migrated(folder)) as made:
        pool.start_all(1, MODEL=str(model), DTYPE="float32")
        yield made


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> openai.OpenAI:
    return gateway.client()


def chat(client: openai.OpenAI, model: Path, **options: Any) -> Any:  # Any: the SDK has a type for each kind of answer
    """Ask."""
    options = {"messages": ASK, "max_tokens": 400, "logit_bias": BIAS, **options}
    return cast("Any", client.chat.completions).create(model=model.name, **options)


def gathered(chunks: Iterator[Any]) -> tuple[str, str, str | None]:
    """The reasoning and the content of a stream, and why it ended. Reasoning comes first."""
    texts, kinds, reason = {"reasoning_content": "", "content": ""}, list[str](), None
    for chunk in chunks:
        delta = chunk.choices[0].delta.model_dump()
        for kind in texts:
            texts[kind] += delta.get(kind) or ""
            kinds += [kind] if delta.get(kind) else []
        reason = chunk.choices[0].finish_reason or reason
    assert kinds == sorted(kinds, reverse=True)
    return texts["reasoning_content"], texts["content"], reason


class TestGivenAModelThatReasons:
    @pytest.mark.parametrize("seed", fast_only(range(1), range(1, 4)))
    def test_when_it_is_asked_then_answer_stream_and_job_have_the_same_parts(
        self, client: openai.OpenAI, server: RedisServer, model: Path, seed: int
    ) -> None:
        with Producer(server.url) as producer:
            job = producer.submit(ASK, seed=seed, max_tokens=400, logit_bias=BIAS, model=model.name)
            parsed = producer.result(job).choices[0].parsed

        whole = chat(client, model, seed=seed).choices[0]
        streamed = gathered(chat(client, model, seed=seed, stream=True))

        assert parsed.reasoning
        assert parsed.content
        assert whole.message.reasoning_content == parsed.reasoning
        assert whole.message.content == parsed.content
        assert streamed == (parsed.reasoning, parsed.content, whole.finish_reason)

    def test_when_it_is_cut_off_amid_a_thought_then_there_is_no_content(
        self, client: openai.OpenAI, model: Path
    ) -> None:
        [choice] = chat(client, model, seed=1, max_tokens=30, logit_bias={THOUGHT: -100, END: -100}).choices

        assert (choice.finish_reason, choice.message.content) == ("length", "")
        assert len(choice.message.reasoning_content) >= 30

    def test_when_a_call_is_required_then_it_follows_the_reasoning(self, client: openai.OpenAI, model: Path) -> None:
        options: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}

        [choice] = chat(client, model, **options).choices

        [call] = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "look")
        assert choice.message.reasoning_content

    def test_when_the_answer_has_a_schema_then_it_alone_matches_it(self, client: openai.OpenAI, model: Path) -> None:
        schema = {"type": "string", "enum": ["yes", "no"]}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}

        [choice] = chat(client, model, seed=2, response_format=form).choices

        assert choice.message.content.strip() in ('"yes"', '"no"')
        assert choice.message.reasoning_content

    def test_when_the_reasoning_is_sent_back_then_the_template_shows_it(
        self, client: openai.OpenAI, model: Path
    ) -> None:
        answer = {"role": "assistant", "content": "Yes."}
        thought = {**answer, "reasoning_content": "x" * 50}

        without, with_it = (
            chat(client, model, messages=[*ASK, message, *ASK], max_tokens=1).usage.prompt_tokens
            for message in (answer, thought)
        )

        assert with_it > without + 50


class TestGivenTheResponsesApi:
    def ask(self, client: openai.OpenAI, model: Path, **options: Any) -> Any:  # Any: as in `chat`
        options = {"input": "Hi", "max_output_tokens": 400, "extra_body": {"logit_bias": BIAS, "seed": 3}, **options}
        return cast("Any", client.responses).create(model=model.name, **options)

    def test_when_it_is_asked_then_the_reasoning_is_an_item_before_the_message(
        self, client: openai.OpenAI, model: Path
    ) -> None:
        answer = self.ask(client, model)

        reasoning, message = answer.output
        whole = chat(client, model, seed=3).choices[0].message
        assert (reasoning.type, message.type) == ("reasoning", "message")
        assert [part.text for part in reasoning.content] == [whole.reasoning_content]
        assert answer.output_text == whole.content
        assert client.responses.retrieve(answer.id).output == answer.output

    def test_when_it_is_streamed_and_resumed_then_the_events_are_those_of_the_whole(
        self, client: openai.OpenAI, model: Path
    ) -> None:
        events = list(self.ask(client, model, stream=True))
        retrieve, name = cast("Any", client.responses).retrieve, events[0].response.id

        for place in range(1, len(events), max(1, len(events) // 8)):
            rest = list(retrieve(name, stream=True, starting_after=events[place - 1].sequence_number))

            for kind in ("response.reasoning_text.delta", "response.output_text.delta"):
                sent, more, whole = (
                    "".join(event.delta for event in some if event.type == kind)
                    for some in (events[:place], rest, events)
                )
                assert sent + more == whole
        reasoning, message = events[-1].response.output
        assert reasoning.content[0].text
        assert message.content[0].text

    def test_when_the_conversation_goes_on_then_the_reasoning_is_in_it(
        self, client: openai.OpenAI, model: Path
    ) -> None:
        first = self.ask(client, model)

        second = self.ask(client, model, previous_response_id=first.id, max_output_tokens=20)

        assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens // 2


class TestGivenAModelThatBeginsItsThoughtsItself:
    def test_when_it_does_or_does_not_then_the_parts_say_so(self, valkey: RedisServer, tmp_path: Path) -> None:
        folder = thinking_model(tmp_path / "thinker", is_opened=False)
        begins, does_not = {3: 100.0}, {3: -100.0}
        with worker_pool(valkey.url, tmp_path) as pool, Producer(valkey.url) as producer:
            pool.start_all(1, MODEL=str(folder), DTYPE="float32")

            thoughtful, plain = (
                producer.result(producer.submit(ASK, seed=1, max_tokens=5, logit_bias=bias)).choices[0].parsed
                for bias in (begins, does_not)
            )

        assert (thoughtful.reasoning, thoughtful.content) == ("<think>" * 4, "")
        assert plain.reasoning is None
        assert plain.content


class TestGivenAWorkerThatIsKilledAmidTheReasoning:
    def test_when_another_goes_on_then_all_readers_have_the_calm_runs_parts(self, tmp_path: Path) -> None:
        folder = thinking_model(tmp_path / "thinker", is_opened=True)
        settings = {"MODEL": str(folder), "DTYPE": "float32"}
        options: dict[str, Any] = {"max_tokens": 1500, "logit_bias": LONG}
        with redis_server("valkey") as server, worker_pool(server.url, tmp_path) as workers:
            [victim] = workers.start_all(1, **settings)
            with (
                gateway_process(server.url, database_url=migrated(tmp_path)) as gateway,
                Producer(server.url) as producer,
                ThreadPoolExecutor() as threads,
            ):
                client = gateway.client()
                calm = _choices(producer, [producer.submit(ASK, seed=seed, **options) for seed in range(6)])
                seed = max(range(6), key=lambda one: _num_thoughts(calm[one]) if calm[one].parsed.content else 0)

                has_begun = Event()
                readers = [
                    threads.submit(_read_chat, client, folder, {**options, "seed": seed, "stream": True}, has_begun),
                    threads.submit(_whole_chat, client, folder, {**options, "seed": seed}),
                    threads.submit(_read_response, client, folder, seed),
                ]
                job = producer.submit(ASK, seed=seed, **options)
                assert has_begun.wait(60)
                victim.kill()
                [num_published] = producer.status(job).published
                workers.start_all(1, **settings)
                [resumed] = _choices(producer, [job])
                found = [reader.result() for reader in readers]

        expected = calm[seed].parsed
        assert expected.reasoning
        assert expected.content
        assert 0 < num_published <= _num_thoughts(calm[seed])
        assert (resumed.token_ids, resumed.parsed) == (calm[seed].token_ids, expected)
        assert found == [(expected.reasoning, expected.content)] * 3


def _choices(producer: Producer, jobs: list[Receipt]) -> list[ChoiceResult]:
    return [producer.result(job).choices[0] for job in jobs]


def _num_thoughts(choice: ChoiceResult) -> int:
    """Tokens of the reasoning."""
    return [*choice.token_ids, THOUGHT].index(THOUGHT)


def _read_chat(client: openai.OpenAI, model: Path, options: dict[str, Any], has_begun: Event) -> tuple[str, str]:
    """Stream a chat, and say when some of its reasoning has come."""

    def seen(chunks: Any) -> Iterator[Any]:  # Any: of the SDK
        num_chars = 0
        for chunk in chunks:
            num_chars += len(chunk.choices[0].delta.model_dump().get("reasoning_content") or "")
            if num_chars > 20:
                has_begun.set()
            yield chunk

    reasoning, content, _ = gathered(seen(chat(client, model, **options)))
    return reasoning, content


def _whole_chat(client: openai.OpenAI, model: Path, options: dict[str, Any]) -> tuple[str, str]:
    message = chat(client, model, **options).choices[0].message
    return message.reasoning_content, message.content


def _read_response(client: openai.OpenAI, model: Path, seed: int) -> tuple[str, str]:
    extra = {"logit_bias": LONG, "seed": seed}
    stream = cast("Any", client.responses).create(
        model=model.name, input="Hi", max_output_tokens=1500, extra_body=extra, stream=True
    )
    events = list(stream)
    reasoning, message = events[-1].response.output
    texts = [
        "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text")
    ]
    assert texts == [reasoning.content[0].text, message.content[0].text]
    return texts[0], texts[1]
