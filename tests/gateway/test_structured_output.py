"""Structured outputs through a gateway, with the stock `openai` client, and with a worker that is killed."""

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from pydantic import BaseModel, Field

from sluice.history.database import open_database
from sluice.producer import JobFailed, Producer, Receipt
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.recorder.migrate import migrate
from tests.end_to_end.processes import WorkerPool, worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.servers import RedisServer, redis_server

MODEL = SMALL_MODEL.name
NULL = "null?step_s=0.004"
HELLO = [ChatCompletionUserMessageParam(role="user", content="Describe a colour.")]

pytestmark = pytest.mark.slow


class Part(BaseModel, extra="forbid"):
    name: Literal["red", "green", "blue"]
    share: int = Field(ge=0, le=100)


class Colour(BaseModel, extra="forbid"):
    title: Literal["dark", "light"]
    parts: list[Part] = Field(min_length=1, max_length=3)
    is_warm: bool


SCHEMA: dict[str, Any] = Colour.model_json_schema()


@pytest.fixture(scope="module")
def server() -> Generator[RedisServer]:
    with redis_server("valkey") as made:
        yield made


@pytest.fixture(scope="module")
def pool(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Generator[WorkerPool]:
    """A worker with the small model."""
    with worker_pool(server.url, tmp_path_factory.mktemp("structured")) as made:
        made.start_all(1, MODEL=str(SMALL_MODEL))
        yield made


@pytest.fixture(scope="module")
def migrated_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('responses') / 'responses.db'}"
    engine = open_database(url, is_writer=True)
    migrate(engine)
    engine.dispose()
    return url


@pytest.fixture(scope="module")
def small(server: RedisServer, pool: WorkerPool, migrated_url: str) -> Generator[GatewayProcess]:
    """Its gateway, with a database for responses."""
    with gateway_process(server.url, database_url=migrated_url) as made:
        yield made


class TestGivenTheStockClient:
    def test_when_a_chat_is_parsed_then_the_model_is_filled(self, small: GatewayProcess) -> None:
        client = small.client()

        answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Colour, max_tokens=400)

        parsed = answer.choices[0].message.parsed
        assert isinstance(parsed, Colour)
        assert 1 <= len(parsed.parts) <= 3

    def test_when_a_response_is_parsed_then_the_model_is_filled(self, small: GatewayProcess) -> None:
        answer = small.client().responses.parse(
            model=MODEL, input="Describe a colour.", text_format=Colour, max_output_tokens=400
        )

        assert isinstance(answer.output_parsed, Colour)

    def test_when_a_chat_is_streamed_then_the_parts_are_the_parsed_whole(self, small: GatewayProcess) -> None:
        with small.client().chat.completions.stream(
            model=MODEL, messages=HELLO, response_format=Colour, max_tokens=200
        ) as stream:
            final = stream.get_final_completion()

        assert isinstance(final.choices[0].message.parsed, Colour)

    @pytest.mark.parametrize(
        ("extra", "pattern"),
        [
            ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
            ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
            ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
            ({"guided_regex": "[xy]{5}"}, "[xy]{5}"),
            ({"guided_choice": ["yes", "no"]}, "yes|no"),
            ({"guided_grammar": 'start: "a" "b"'}, "ab"),
            ({"structured": {"choice": ["yes", "no"]}}, "yes|no"),
        ],
    )
    def test_when_vllms_names_are_given_then_the_text_matches(
        self, small: GatewayProcess, extra: dict[str, Any], pattern: str
    ) -> None:
        answer = small.client().chat.completions.create(model=MODEL, messages=HELLO, max_tokens=200, extra_body=extra)

        assert re.fullmatch(pattern, answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"

    @pytest.mark.parametrize("name", ["guided_json", "structured_outputs"])
    def test_when_vllm_is_given_a_schema_then_the_text_is_valid(self, small: GatewayProcess, name: str) -> None:
        extra = {name: SCHEMA if name == "guided_json" else {"json": SCHEMA}}

        answer = small.client().completions.create(model=MODEL, prompt="A colour: ", max_tokens=400, extra_body=extra)

        jsonschema.validate(json.loads(answer.choices[0].text), SCHEMA)

    @pytest.mark.parametrize(
        "schema", [{"type": "nothing"}, {"type": "string", "pattern": "(a"}, {"allOf": [{"$ref": "#"}]}]
    )
    def test_when_a_schema_cannot_be_compiled_then_it_is_400_with_the_reason(
        self, small: GatewayProcess, schema: dict[str, Any]
    ) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}  # Any: the SDK's types

        with pytest.raises(openai.BadRequestError) as raised:
            small.client().chat.completions.create(model=MODEL, messages=HELLO, response_format=form)

        assert "grammar" in str(raised.value)

    def test_when_a_schema_has_ten_megabytes_then_it_is_400(self, small: GatewayProcess) -> None:
        schema = {"enum": ["x" * 1000] * 10_000}
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}  # Any: the SDK's types

        with pytest.raises(openai.APIStatusError) as raised:
            small.client().chat.completions.create(model=MODEL, messages=HELLO, response_format=form)

        assert 400 <= raised.value.status_code < 500

    def test_when_eos_is_ignored_too_then_it_is_400_and_names_the_parameter(self, small: GatewayProcess) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            small.client().chat.completions.create(
                model=MODEL,
                messages=HELLO,
                response_format={"type": "json_object"},
                extra_body={"ignore_eos": True},
            )

        assert raised.value.param == "response_format"


class TestGivenTheProducer:
    def test_when_a_schema_is_submitted_then_the_result_is_valid(self, server: RedisServer, pool: WorkerPool) -> None:
        with Producer(server.url) as producer:
            job = producer.submit("A colour: ", structured={"json_schema": SCHEMA}, max_tokens=400)
            text = producer.result(job).text

        jsonschema.validate(json.loads(text), SCHEMA)

    def test_when_it_cannot_be_compiled_then_the_job_fails_with_a_sentence(
        self, server: RedisServer, pool: WorkerPool
    ) -> None:
        with Producer(server.url) as producer, pytest.raises(JobFailed, match="cannot be compiled"):
            producer.result(producer.submit("hello", structured={"regex": "(a"}))


class TestGivenAWorkerThatIsKilledAmidJson:
    def test_when_jobs_go_on_elsewhere_then_all_are_valid_and_have_the_calm_runs_tokens(self, tmp_path: Path) -> None:
        schema = {
            "type": "array",
            "minItems": 30,
            "maxItems": 30,
            "items": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9999}, "of": {"enum": ["a", "bb"]}},
                "required": ["n", "of"],
                "additionalProperties": False,
            },
        }
        with redis_server("valkey") as server, worker_pool(server.url, tmp_path) as workers:
            [victim] = workers.start_all(1, MODEL=NULL)
            with Producer(server.url) as producer:

                def submit() -> list[Receipt]:
                    return [
                        producer.submit(
                            f"job {number}", structured={"json_schema": schema}, seed=number, max_tokens=4000
                        )
                        for number in range(16)
                    ]

                calm = [producer.result(job) for job in submit()]
                jobs = submit()
                for job in jobs[:4]:
                    _read_some(producer, job)
                workers.start_all(1, MODEL=NULL)
                victim.kill()
                disturbed = [producer.result(job) for job in jobs]

        assert [result.choices[0].token_ids for result in disturbed] == [result.choices[0].token_ids for result in calm]
        for result in disturbed:
            jsonschema.validate(json.loads(result.text), schema)


def _read_some(producer: Producer, job: Receipt) -> None:
    """Read until 40 tokens have come."""
    num_tokens = 0
    for event in producer.stream(job):
        num_tokens += len(event.token_ids)
        if num_tokens >= 40:
            return
