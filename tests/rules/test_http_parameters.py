"""docs/reference/http-parameters.md says of every parameter what the code does with it."""

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions

from sluice.protocol.bulk_files.input import OWN
from sluice.protocol.jobs import Options
from sluice.protocol.openai_format import requests
from sluice.protocol.openai_format.requests import CHAT, COMPLETIONS, Endpoint, RequestRefused, read_request
from tests.end_to_end.processes import ROOT

PAGE = (ROOT / "docs" / "reference" / "http-parameters.md").read_text()
BODIES: dict[Endpoint, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"prompt": "hello"},
}
READ_BY_THE_GATEWAY = {"stream", "stream_options", "messages", "prompt"}
VALUES: dict[str, Any] = {
    "model": "m", "max_tokens": 7, "max_completion_tokens": 9, "n": 2, "seed": 3, "temperature": 0.5, "top_p": 0.9,
    "stop": ["a", "b"], "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": 2}, "metadata": {"a": "b"},
    "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": [6], "ignore_eos": True,
    "skip_special_tokens": False, "add_special_tokens": False, "priority": 4,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "structured_outputs": {"json": {"type": "object"}}, "guided_json": {"type": "object"}, "guided_regex": "a",
    "guided_choice": ["a"], "guided_grammar": "b", "structured": {"json_object": True}, "prompt_logprobs": 2,
    "echo": True,
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto", "parallel_tool_calls": False,
}  # fmt: skip
AS_SCHEMA = {"structured": {"json_schema": {"type": "object"}}}
AS_JOB: dict[str, Any] = {
    "max_completion_tokens": {"max_tokens": 9},
    "logit_bias": {"logit_bias": {5: 2}},
    "response_format": AS_SCHEMA,
    "structured_outputs": AS_SCHEMA,
    "guided_json": AS_SCHEMA,
    "guided_regex": {"structured": {"regex": "a"}},
    "guided_choice": {"structured": {"choice": ["a"]}},
    "guided_grammar": {"structured": {"lark": "b"}},
}
"""What a parameter becomes that is not passed on as it is."""


class Row(NamedTuple):
    """One parameter of one route."""

    name: str
    endpoint: Endpoint
    verdict: str


def rows() -> Iterator[Row]:
    """The page's table."""
    for name, chat, completions in re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE):
        yield Row(name, CHAT, chat)
        yield Row(name, COMPLETIONS, completions)


ROWS = list(rows())


def options_of(endpoint: Endpoint, **parameters: Any) -> Options:
    return read_request(endpoint, {**BODIES[endpoint], **parameters}).options


def rows_with(verdict: str) -> pytest.MarkDecorator:
    """One test for each such row."""
    found = [row for row in ROWS if row.verdict.startswith(verdict)]
    return pytest.mark.parametrize("row", found, ids=[f"{row.name} {row.endpoint}" for row in found])


class TestGivenEveryParameterThatIsServed:
    @rows_with("served")
    def test_when_a_request_has_it_then_the_job_has_it(self, row: Row) -> None:
        if row.name in READ_BY_THE_GATEWAY | {"logprobs", "top_logprobs"}:
            return  # tested below, and with the gateway

        options = options_of(row.endpoint, **{row.name: VALUES[row.name]})

        assert options == AS_JOB.get(row.name, {row.name: VALUES[row.name]})

    def test_when_logprobs_are_asked_for_then_each_route_has_its_form(self) -> None:
        assert options_of(CHAT, logprobs=True, top_logprobs=3) == {"logprobs": 3}
        assert options_of(CHAT, logprobs=True) == {"logprobs": 0}
        assert options_of(CHAT, logprobs=False) == {}
        assert options_of(COMPLETIONS, logprobs=3) == {"logprobs": 3}


class TestGivenEveryParameterThatIsIgnored:
    @rows_with("ignored")
    @pytest.mark.parametrize("value", ["x", 1, {"type": "content", "content": "x"}])
    def test_when_a_request_has_it_then_nothing_changes(self, row: Row, value: object) -> None:
        assert options_of(row.endpoint, **{row.name: value}) == {}


class TestGivenEveryParameterWithHarmlessValues:
    @rows_with("only")
    def test_when_it_has_one_then_nothing_changes_and_others_are_refused(self, row: Row) -> None:
        harmless = [json.loads(value) for value in re.findall("`([^`]+)`", row.verdict)]

        assert [options_of(row.endpoint, **{row.name: value}) for value in harmless] == [{}] * len(harmless)
        with pytest.raises(RequestRefused) as refused:
            options_of(row.endpoint, **{row.name: "else"})
        assert (refused.value.code, refused.value.param) == ("unsupported", row.name)

    def test_when_as_many_are_the_best_as_are_asked_for_then_nothing_changes(self) -> None:
        assert options_of(COMPLETIONS, n=3, best_of=3) == {"n": 3}


class TestGivenEveryParameterThatIsRefused:
    @rows_with("refused")
    def test_when_a_request_has_it_then_the_error_names_it(self, row: Row) -> None:
        with pytest.raises(RequestRefused) as refused:
            options_of(row.endpoint, **{row.name: 1})

        assert (refused.value.code, refused.value.param) == ("unsupported", row.name)


class TestGivenTheTable:
    def test_when_the_code_knows_a_parameter_then_the_table_has_it(self) -> None:
        known = requests.SAME | requests.IGNORED | requests.HARMLESS.keys() | requests.TRANSLATED | requests.OF_TOOLS

        assert {row.name for row in ROWS} == known

    def test_when_plain_lines_have_options_of_their_own_then_the_page_names_them(self) -> None:
        [named] = re.findall(r"options of the\s+queue: (.+?)\.\n", PAGE, re.DOTALL)

        assert {*re.findall(r"`(\w+)`", named)} == OWN

    @pytest.mark.parametrize(
        ("endpoint", "create"),
        [
            (CHAT, ChatCompletions.create),
            (COMPLETIONS, Completions.create),
        ],
    )
    def test_when_the_client_has_a_parameter_then_the_table_has_it(self, endpoint: Endpoint, create: Any) -> None:
        of_the_client = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
        taken = inspect.signature(create).parameters.keys() - of_the_client

        assert taken - {row.name for row in ROWS if row.endpoint == endpoint} == set()
