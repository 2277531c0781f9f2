"""Batches with tools, by the stock client: each line has the calls that the direct endpoint answers with."""

import json
from pathlib import Path
from typing import Any, cast

import jsonschema
import openai
from openai.types.chat import ChatCompletion

from tests.end_to_end.processes import worker_pool
from tests.gateway.batches.processes import begun, chat_line, encoded, lines_of, place_in, until, until_it
from tests.servers import RedisServer


def parameters(count: int) -> dict[str, Any]:
    """The schema of arguments with so many numbers."""
    items = {"type": "integer", "minimum": 0, "maximum": 99_999}
    numbers = {"type": "array", "items": items, "minItems": count, "maxItems": count}
    known = {"numbers": numbers, "unit": {"enum": ["m", "ft"]}}
    return {"type": "object", "properties": known, "required": list(known), "additionalProperties": False}


def options(seed: int, count: int) -> dict[str, Any]:
    """What a line asks for."""
    function = {"name": f"add_{seed}", "description": "Add lengths.", "parameters": parameters(count)}
    tools = [{"type": "function", "function": function}, {"type": "function", "function": {"name": "wait"}}]
    choice = {"type": "function", "function": {"name": f"add_{seed}"}}
    return {
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": seed % 2 == 0,
        "seed": seed,
        "max_tokens": 900,
    }


def answers(client: openai.OpenAI, file_id: str | None) -> dict[int, ChatCompletion]:
    """The bodies of an output file's lines, as the client's type, by their seeds."""
    found = {int(line["custom_id"]): line["response"]["body"] for line in lines_of(client, file_id)}
    return {seed: ChatCompletion.model_validate(body, strict=True) for seed, body in found.items()}


def calls(answer: ChatCompletion) -> list[tuple[str, str]]:
    """The calls of an answer, without their ids."""
    made = answer.choices[0].message.tool_calls or []
    assert len({call.id for call in made}) == len(made)
    return [(call.function.name, call.function.arguments) for call in made if call.type == "function"]


class TestGivenAFileWhoseLinesHaveTools:
    def test_when_its_batch_ends_then_each_line_has_the_calls_of_the_direct_endpoint(
        self, client: openai.OpenAI
    ) -> None:
        asked = {seed: chat_line(str(seed), **options(seed, 2)) for seed in range(12)}
        direct: dict[int, ChatCompletion] = {
            seed: cast("Any", client.chat.completions).create(**line["body"]) for seed, line in asked.items()
        }

        batch = until(client, begun(client, encoded(asked.values())))

        found = answers(client, batch.output_file_id)
        assert batch.error_file_id is None
        assert found.keys() == asked.keys()
        for seed, answer in found.items():
            message = answer.choices[0].message
            assert calls(answer) == calls(direct[seed])
            assert (message.content, answer.choices[0].finish_reason) == (
                direct[seed].choices[0].message.content,
                direct[seed].choices[0].finish_reason,
            )
        made = [
            call for answer in found.values() for call in calls(answer) if answer.choices[0].finish_reason != "length"
        ]
        assert made
        for _, arguments in made:
            jsonschema.validate(json.loads(arguments), parameters(2))

    def test_when_results_of_calls_are_in_messages_then_the_line_is_answered(self, client: openai.OpenAI) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "add_1", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        ]
        line = chat_line("1", **{**options(1, 2), "messages": messages, "tool_choice": "none"})

        batch = until(client, begun(client, encoded([line])))

        [answer] = answers(client, batch.output_file_id).values()
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].message.content

    def test_when_a_tool_is_wrong_then_the_batch_fails_and_names_the_line(self, client: openai.OpenAI) -> None:
        bad = chat_line("2", tools=[{"type": "web_search"}])

        batch = until(client, begun(client, encoded([chat_line("1"), bad])))

        assert batch.status == "failed"
        assert batch.errors is not None
        [error] = batch.errors.data or []
        assert (error.line, error.param) == (2, "tools")


class TestGivenAWorkerThatIsKilledAmidTheArguments:
    def test_when_another_goes_on_then_the_calls_are_those_of_the_calm_run(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        place, settings = place_in(tmp_path, valkey.url), {"MODEL": "null?step_s=0.01", "TOOL_FORMAT": "hermes"}
        file = encoded(chat_line(str(seed), **options(seed, 5 + 12 * seed)) for seed in range(8))
        with worker_pool(valkey.url, tmp_path) as pool, place.callbacks(), place.gateway() as gateway:
            [victim] = pool.start_all(1, **settings)
            client = gateway.client()
            calm = answers(client, until(client, begun(client, file)).output_file_id)

            batch = begun(client, file)
            until_it(
                client, batch, lambda found: found.request_counts is not None and found.request_counts.completed > 0
            )
            victim.kill()
            amid = client.batches.retrieve(batch.id).request_counts
            pool.start_all(1, **settings)
            disturbed = answers(client, until(client, batch).output_file_id)

        assert amid is not None
        assert amid.completed < amid.total
        assert disturbed.keys() == calm.keys()
        assert {seed: calls(answer) for seed, answer in disturbed.items()} == {
            seed: calls(answer) for seed, answer in calm.items()
        }
