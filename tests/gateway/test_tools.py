"""Tools through a gateway, with the stock `openai` client, and with a worker that is killed amid the arguments."""

import json
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from sluice.history.database import open_database
from sluice.producer import Producer, Receipt
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.recorder.migrate import migrate
from tests.end_to_end.processes import WorkerPool, worker_pool
from tests.gateway.gateway_process import gateway_process
from tests.servers import RedisServer, redis_server

MODEL = SMALL_MODEL.name
NULL = "null?step_s=0.004"
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]

pytestmark = pytest.mark.slow


class Weather(BaseModel, extra="forbid"):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


class Sum(BaseModel, extra="forbid"):
    """Add numbers."""

    numbers: list[int] = Field(min_length=2, max_length=3)


MODELS: dict[str, type[BaseModel]] = {"Weather": Weather, "Sum": Sum}
TOOLS: list[Any] = [openai.pydantic_function_tool(kind) for kind in MODELS.values()]


@pytest.fixture(scope="module")
def server() -> Generator[RedisServer]:
    with redis_server("valkey") as made:
        yield made


@pytest.fixture(scope="module")
def pool(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Generator[WorkerPool]:
    """A worker with the small model, whose template has no tools."""
    with worker_pool(server.url, tmp_path_factory.mktemp("tools")) as made:
        made.start_all(1, MODEL=str(SMALL_MODEL), TOOL_FORMAT="hermes")
        yield made


@pytest.fixture(scope="module")
def migrated_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('responses') / 'responses.db'}"
    engine = open_database(url, is_writer=True)
    migrate(engine)
    engine.dispose()
    return url


@pytest.fixture(scope="module")
def client(server: RedisServer, pool: WorkerPool, migrated_url: str) -> Generator[openai.OpenAI]:
    with gateway_process(server.url, database_url=migrated_url) as made:
        yield made.client()


def create(client: openai.OpenAI, **options: Any) -> Any:  # Any: the SDK has a type for each kind of answer
    """Ask."""
    return cast("Any", client.chat.completions).create(model=MODEL, messages=ASK, **options)


def check(calls: Any) -> None:  # Any: the SDK has a type for each kind of call
    """Check that calls are valid."""
    assert calls
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        MODELS[call.function.name].model_validate_json(call.function.arguments)


class TestGivenTheStockClient:
    def test_when_a_call_is_required_then_it_is_valid(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=400
        )

        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        check(choice.message.tool_calls)
        assert len(choice.message.tool_calls or ()) == 1

    def test_when_a_function_is_named_then_it_is_called(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "Sum"}},
            parallel_tool_calls=False,
            max_tokens=400,
        )

        check(answer.choices[0].message.tool_calls)
        assert [
            call.function.name for call in answer.choices[0].message.tool_calls or () if call.type == "function"
        ] == ["Sum"]

    @pytest.mark.parametrize("max_tokens", [20, 120])
    def test_when_it_is_streamed_then_the_pieces_are_the_whole(self, client: openai.OpenAI, max_tokens: int) -> None:
        options: Any = {"tools": TOOLS, "tool_choice": "required", "seed": 5, "max_tokens": max_tokens}
        whole: dict[str, Any] = create(client, **options).model_dump()["choices"][0]
        stream = create(client, **options, stream=True)

        chunks: list[dict[str, Any]] = [chunk.model_dump()["choices"][0] for chunk in stream]
        calls: list[dict[str, Any]] = whole["message"]["tool_calls"]
        pieces = [piece for chunk in chunks for piece in chunk["delta"]["tool_calls"] or ()]

        assert chunks[0]["delta"]["role"] == "assistant"
        assert chunks[-1]["finish_reason"] == whole["finish_reason"]
        assert [(piece["index"], piece["function"]["name"]) for piece in pieces if piece["id"]] == [
            (number, call["function"]["name"]) for number, call in enumerate(calls)
        ]
        for number, call in enumerate(calls):
            written = [piece["function"]["arguments"] for piece in pieces if piece["index"] == number]
            assert "".join(written) == call["function"]["arguments"]

    def test_when_the_client_gathers_a_stream_then_the_arguments_are_models(self, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(
            model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=400
        ) as stream:
            final = stream.get_final_completion()

        check(final.choices[0].message.tool_calls)

    def test_when_it_is_parsed_then_the_arguments_are_models(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.parse(
            model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=400
        )

        for call in answer.choices[0].message.tool_calls or ():
            assert isinstance(call.function.parsed_arguments, MODELS[call.function.name])

    def test_when_tools_may_be_called_then_what_is_called_is_valid(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, max_tokens=100, n=4)

        for choice in answer.choices:
            assert (choice.finish_reason == "tool_calls") is (
                choice.message.tool_calls is not None and choice.finish_reason != "length"
            )

    def test_when_a_result_is_given_back_then_the_model_answers(self, client: openai.OpenAI) -> None:
        first = (
            client.chat.completions.create(
                model=MODEL,
                messages=ASK,
                tools=TOOLS,
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=400,
            )
            .choices[0]
            .message
        )
        [call] = list(first.tool_calls or ())

        answer = client.chat.completions.create(
            model=MODEL,
            messages=[*ASK, first.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}],  # type: ignore[list-item]
            tools=TOOLS,
            tool_choice="none",
            max_tokens=20,
        )

        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].message.content

    @pytest.mark.parametrize(
        ("change", "param", "words"),
        [
            (
                {"tool_choice": {"type": "function", "function": {"name": "other"}}},
                "tool_choice",
                "name one of the tools",
            ),
            ({"tools": TOOLS[:1] * 2}, "tools", "different names"),
            ({"tools": [{"type": "web_search"}]}, "tools", "type 'function'"),
            ({"tools": [], "tool_choice": "required"}, "tool_choice", "without tools"),
            ({"extra_body": {"ignore_eos": True}}, "tools", "ignore_eos"),
            (
                {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}]},
                None,
                "(in f_0)",
            ),
            (
                {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 200_000}}]},
                "tools",
                "characters",
            ),
        ],
    )
    def test_when_tools_are_wrong_then_it_is_400_with_the_reason(
        self, client: openai.OpenAI, change: dict[str, Any], param: str | None, words: str
    ) -> None:
        options: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": TOOLS, **change}

        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(**options)

        assert raised.value.param == param
        assert words in str(raised.value)


class TestGivenABulkFile:
    def test_when_its_lines_have_tools_then_the_output_has_valid_calls(
        self, server: RedisServer, pool: WorkerPool, tmp_path: Path
    ) -> None:
        shared: dict[str, Any] = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 400}
        shared["parallel_tool_calls"] = False
        body = {"method": "POST", "url": "/v1/chat/completions", "body": shared}
        lines = [{"custom_id": "openai", **body}, {"custom_id": "plain", **shared}]
        questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
        questions.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

        command = [sys.executable, "-m", "sluice.producer", "submit", str(questions), "--wait", "-o", str(answers)]
        subprocess.run([*command, "--redis-url", server.url], check=True, timeout=100)

        written = [json.loads(line) for line in answers.read_text().splitlines()]
        assert {line["custom_id"] for line in written} == {"openai", "plain"}
        for line in written:
            [choice] = line["response"]["body"]["choices"]
            assert choice["finish_reason"] == "tool_calls"
            for call in choice["message"]["tool_calls"]:
                MODELS[call["function"]["name"]].model_validate_json(call["function"]["arguments"])


class TestGivenTheResponsesApi:
    TOOLS: ClassVar[list[dict[str, Any]]] = [{"type": "function", **tool["function"]} for tool in TOOLS]

    def ask(self, client: openai.OpenAI, **options: Any) -> Any:  # Any: as in `create`
        options = {"input": "Weather?", "tools": self.TOOLS, "max_output_tokens": 400, **options}
        return cast("Any", client.responses).create(model=MODEL, parallel_tool_calls=False, **options)

    def test_when_its_output_is_given_then_the_conversation_goes_on(self, client: openai.OpenAI) -> None:
        first = self.ask(client, tool_choice={"type": "function", "name": "Weather"})
        [call] = first.output
        Weather.model_validate_json(call.arguments)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}

        answer = self.ask(client, previous_response_id=first.id, input=[output], tool_choice="none")

        assert (call.type, call.name, call.status, first.status) == (
            "function_call",
            "Weather",
            "completed",
            "completed",
        )
        assert [item.type for item in answer.output] == ["message"]
        assert [item.type for item in client.responses.input_items.list(answer.id)] == ["function_call_output"]
        assert client.responses.retrieve(first.id).output == first.output

    def test_when_the_items_are_sent_back_then_it_is_the_same_conversation(self, client: openai.OpenAI) -> None:
        first = self.ask(client, tool_choice="required")
        [call] = first.output
        items = [
            {"role": "user", "content": "Weather?"},
            call.to_dict(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ]

        answer = self.ask(client, input=items, tool_choice="none", store=False)

        assert answer.status in ("completed", "incomplete")

    def test_when_it_is_streamed_and_resumed_then_the_events_are_those_of_the_whole(
        self, client: openai.OpenAI
    ) -> None:
        events = list(self.ask(client, tool_choice="required", stream=True))
        retrieve, name = cast("Any", client.responses).retrieve, events[0].response.id

        for place in range(1, len(events), 5):
            rest = list(retrieve(name, stream=True, starting_after=events[place - 1].sequence_number))

            whole = [one.type for one in events[place:] if not one.type.endswith(".delta")]
            assert [one.type for one in rest if not one.type.endswith(".delta")] == whole
            sent = "".join(one.delta for one in events[:place] if one.type.endswith(".delta"))
            more = "".join(one.delta for one in rest if one.type.endswith(".delta"))
            assert sent + more == events[-1].response.output[0].arguments

    def test_when_the_client_gathers_a_stream_then_the_arguments_are_those_of_the_end(
        self, client: openai.OpenAI
    ) -> None:
        tools: Any = self.TOOLS
        with client.responses.stream(
            model=MODEL, input="Weather?", tools=tools, tool_choice="required", parallel_tool_calls=False
        ) as stream:
            final = stream.get_final_response()

        assert [item.type for item in final.output] == ["function_call"]

    def test_when_an_output_has_no_call_then_it_is_400(self, client: openai.OpenAI) -> None:
        output = {"type": "function_call_output", "call_id": "call_x", "output": "sunny"}

        with pytest.raises(openai.BadRequestError, match="call_x") as raised:
            self.ask(client, input=[output])

        assert raised.value.param == "input"


class TestGivenAWorkerThatIsKilledAmidTheArguments:
    def test_when_jobs_go_on_elsewhere_then_streams_and_results_have_the_calm_runs_calls(self, tmp_path: Path) -> None:
        items = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9999}}
        numbers = {**items, "minItems": 40, "maxItems": 40}
        parameters = {"type": "object", "properties": {"numbers": numbers}, "required": ["numbers"]}
        function: dict[str, Any] = {"name": "add", "parameters": {**parameters, "additionalProperties": False}}
        options: dict[str, Any] = {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 4000,
        }
        settings = {"MODEL": NULL, "TOOL_FORMAT": "hermes"}
        with redis_server("valkey") as server, worker_pool(server.url, tmp_path) as workers:
            [victim] = workers.start_all(1, **settings)
            with gateway_process(server.url) as gateway, Producer(server.url) as producer:
                client = gateway.client()

                def submit() -> list[Receipt]:
                    return [producer.submit(ASK, **options, seed=number) for number in range(8)]

                calm = [producer.result(job).choices[0] for job in submit()]
                with ThreadPoolExecutor() as threads:
                    streams = [threads.submit(_gathered, client, {**options, "seed": seed}) for seed in range(4)]
                    jobs = submit()
                    _read_some(producer, jobs[0])
                    workers.start_all(1, **settings)
                    victim.kill()
                    disturbed = [producer.result(job).choices[0] for job in jobs]
                    streamed = [stream.result() for stream in streams]

        assert [choice.token_ids for choice in disturbed] == [choice.token_ids for choice in calm]
        assert {choice.format for choice in disturbed} == {"hermes"}
        calls = [choice.parsed.calls for choice in disturbed]
        assert streamed == [(call.name, call.arguments) for [call] in calls[:4]]
        for [call] in calls:
            assert call.name == "add"
            jsonschema.validate(json.loads(call.arguments), function["parameters"])


def _gathered(client: openai.OpenAI, options: dict[str, Any]) -> tuple[str, str]:
    """Stream an answer, and join its only call."""
    name = arguments = ""
    for chunk in cast("Any", client.chat.completions).create(model="null", messages=ASK, stream=True, **options):
        for piece in chunk.choices[0].delta.tool_calls or ():
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    return name, arguments


def _read_some(producer: Producer, job: Receipt) -> None:
    """Read until 60 tokens have come."""
    num_tokens = 0
    for event in producer.stream(job):
        num_tokens += len(event.token_ids)
        if num_tokens >= 60:
            return
