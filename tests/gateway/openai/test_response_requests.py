"""Bodies of requests to /v1/responses: what is accepted, ignored and refused."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.gateway.openai.response_requests import ResponseRequest, read_response_request
from sluice.protocol.openai_format.requests import RequestRefused

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
NAMES = [
    *("input", "instructions", "store", "background", "stream", "text", "tools", "reasoning", "logit_bias"),
    *("metadata", "previous_response_id", "max_output_tokens", "include", "type", "role", "content"),
]
bodies = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), json_values, max_size=6)


def read(**fields: Any) -> ResponseRequest:  # Any: JSON
    """A request with an input."""
    return read_response_request({"input": "hello", **fields})


def refusal(**fields: Any) -> RequestRefused:  # Any: JSON
    """The error of such a request."""
    with pytest.raises(RequestRefused) as raised:
        read(**fields)
    return raised.value


class TestGivenAnInput:
    @pytest.mark.parametrize(
        ("given", "content"),
        [
            ({"role": "user", "content": "a"}, "a"),
            ({"type": "message", "role": "developer", "content": "a"}, "a"),
            ({"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ],
    )
    def test_when_it_is_messages_then_their_text_is_read(self, given: dict[str, Any], content: str) -> None:
        [item] = read(input=[given]).input

        assert item == {"role": given["role"], "content": content}

    def test_when_it_is_text_then_it_is_the_users(self) -> None:
        assert read().input == ({"role": "user", "content": "hello"},)

    def test_when_it_has_an_output_of_before_then_its_text_is_read(self) -> None:
        part: dict[str, Any] = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
        before: dict[str, Any] = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }

        assert read(input=[before]).input == ({"role": "assistant", "content": "hi"},)

    @pytest.mark.parametrize(
        ("wrong", "place"),
        [
            *((None, ""), ("", ""), ([], ""), (1, ""), ([1], "[0]"), (["text"], "[0]")),
            ([{"role": "tool", "content": "a"}], "[0].role"),
            ([{"role": "user"}], "[0].content"),
            ([{"type": "function_call_output", "output": "a"}], "[0].call_id"),
            ([{"type": "function_call", "call_id": "c", "name": "f"}], "[0].arguments"),
            ([{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_1"}], "[1].type"),
            ([{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}], "[0].content"),
            ([{"role": "user", "content": [{"type": "input_text"}]}], "[0].content"),
            ([{"role": "user", "content": "a", "tool_calls": [1]}], "[0].tool_calls"),
        ],
    )
    def test_when_it_is_anything_else_then_the_place_is_named(self, wrong: Any, place: str) -> None:
        assert refusal(input=wrong).param == f"input{place}"


class TestGivenParameters:
    def test_when_they_are_the_queues_then_they_are_passed_on(self) -> None:
        request = read(
            model="null", max_output_tokens=7, temperature=0.5, top_p=0.9, seed=3, metadata={"a": "b"}, stop=["x"]
        )

        assert request.options == {
            "model": "null", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3, "metadata": {"a": "b"},
            "stop": ["x"],
        }  # fmt: skip
        assert request.shown == {"max_output_tokens": 7, "temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}}

    @pytest.mark.parametrize(
        "harmless",
        [
            {"include": [], "truncation": "disabled"},
            {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "reasoning": {"effort": "none"}},
            {"text": {"format": {"type": "text"}, "verbosity": None}, "top_logprobs": 0},
            {"user": "u", "safety_identifier": "s", "service_tier": "auto", "stream_options": {}, "max_tool_calls": 1},
            {"instructions": None, "previous_response_id": None, "conversation": None},
        ],
    )
    def test_when_they_change_nothing_then_they_are_accepted(self, harmless: dict[str, Any]) -> None:
        assert read(**harmless).options == {}

    @pytest.mark.parametrize(
        ("text", "code", "param"),
        [
            ({"format": {"type": "json_schema"}}, "invalid_request", "text.format"),
            ({"format": {"type": "grammar"}}, "unsupported", "text.format"),
            ({"verbosity": "low"}, "unsupported", "text.verbosity"),
        ],
    )
    def test_when_a_form_is_not_served_then_the_error_names_the_member(
        self, text: dict[str, Any], code: str, param: str
    ) -> None:
        error = refusal(text=text)

        assert (error.code, error.param) == (code, param)

    def test_when_a_schema_is_the_format_then_it_is_the_option_and_the_response_shows_it(self) -> None:
        text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}

        request = read(text=text)

        assert request.options == {"structured": {"json_schema": {"type": "object"}}}
        assert request.shown["text"] == text

    @pytest.mark.parametrize(
        ("name", "value", "code"),
        [
            ("truncation", "auto", "unsupported"),
            ("text", "json", "invalid_request"),
            ("include", ["message.output_text.logprobs"], "unsupported"),
            ("n", 2, "unsupported"),
            ("conversation", "conv_1", "unknown_parameter"),
            ("max_tokens", 5, "unknown_parameter"),
            ("messages", [], "unknown_parameter"),
            ("store", "yes", "invalid_request"),
            ("instructions", ["a"], "invalid_request"),
            ("previous_response_id", 1, "invalid_request"),
            ("user", {"a": [1]}, "invalid_request"),
            ("prompt_cache_key", 5, "invalid_request"),
            ("safety_identifier", ["a"], "invalid_request"),
            ("model", {}, "invalid_request"),
            ("model", "a\0b", "invalid_request"),
            ("logit_bias", {"x": 1}, "invalid_request"),
        ],
    )
    def test_when_they_are_not_served_then_the_error_names_them(self, name: str, value: Any, code: str) -> None:
        error = refusal(**{name: value})

        assert (error.code, error.param) == (code, name)

    def test_when_it_is_not_to_be_stored_then_it_cannot_run_in_the_background(self) -> None:
        assert refusal(store=False, background=True).param == "background"
        assert read(background=True).is_stored


class TestGivenAnyJson:
    @given(body=bodies | json_values)
    def test_when_it_is_read_then_it_is_accepted_or_refused(self, body: Any) -> None:
        with suppress(RequestRefused):
            request = read_response_request(body)

            assert request.input
