"""The options of tools and the messages about their calls: what callers give, what is stored, what is refused."""

from typing import Any

import pytest

from sluice.protocol import limits
from sluice.protocol.errors import InvalidJob
from sluice.protocol.jobs import Options, as_prompt, template
from sluice.protocol.messages import JobSpec, Message
from sluice.protocol.sampling import JobOptions
from sluice.protocol.tools import ToolCall, functions_of, stored_choice, stored_tools
from sluice.protocol.wire import WireError, decode_prompt, decode_spec, encode_prompt

PARAMETERS = {"type": "object", "properties": {"é": {"type": "string"}}}
CHAT_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS, "strict": True}}
RESPONSE_TOOL: dict[str, Any] = {"type": "function", **CHAT_TOOL["function"], "description": None}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": "f"}, "tools must be a list"),
    ({"tools": [1]}, "tools must be a list"),
    ({"tools": [{"type": "web_search"}]}, "tools must have the type 'function'"),
    ({"tools": [{"type": "function", "function": 1}]}, "tools must have an object"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools must have names"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools must have names"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools must have names"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools must have a JSON"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools must have true"),
    ({"tools": [{"type": "function", "function": {"name": "f", "other": 1}}]}, "tools must have only"),
    ({"tools": [{"type": "function", "name": "f", "description": "\ud800"}]}, "tools must have text"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"a": float("nan")}}]}, "can be read"),
    ({"tools": [CHAT_TOOL, RESPONSE_TOOL]}, "different names, got 'f' twice"),
    (
        {"tools": [{"type": "function", "name": f"f{n}"} for n in range(limits.MAX_TOOLS + 1)]},
        "tools may have 128",
    ),
    ({"tools": [{"type": "function", "name": "f", "description": "x" * 200_000}]}, "at most 131072 characters"),
    ({"tool_choice": "required"}, "tool_choice must be auto or none without tools"),
    ({"tools": [CHAT_TOOL], "tool_choice": "must"}, "tool_choice must be one of"),
    ({"tools": [CHAT_TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice must be one of"),
    ({"tools": [CHAT_TOOL], "tool_choice": "function:g"}, r"name one of the tools \(f\), got 'g'"),
    ({"tools": [CHAT_TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls must be true or false"),
    ({"tools": [CHAT_TOOL], "ignore_eos": True}, "tools must not be combined"),
    ({"tools": [CHAT_TOOL], "max_tokens": 0}, "tools must not be given"),
]


class TestGivenToolsOfCallers:
    def test_when_they_have_either_form_then_the_same_is_stored(self) -> None:
        assert stored_tools([CHAT_TOOL]) == stored_tools([RESPONSE_TOOL])
        [function] = functions_of(stored_tools([CHAT_TOOL]))
        assert (function.name, function.parameters, function.is_strict) == ("f", PARAMETERS, True)

    def test_when_a_template_shows_one_then_it_has_openais_form_without_strict(self) -> None:
        [function] = functions_of(stored_tools([CHAT_TOOL]))

        assert function.shown == {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}

    @pytest.mark.parametrize(
        ("value", "stored"),
        [
            (None, "auto"),
            ("required", "required"),
            ({"type": "function", "function": {"name": "auto"}}, "function:auto"),
            ({"type": "function", "name": "f"}, "function:f"),
            ("function:f", "function:f"),
        ],
    )
    def test_when_a_choice_is_given_then_it_is_a_word(self, value: object, stored: str) -> None:
        assert stored_choice(value) == stored

    def test_when_a_job_has_them_then_it_needs_the_feature_and_is_read_again(self) -> None:
        made = template(Options(tools=[CHAT_TOOL], tool_choice="required", parallel_tool_calls=False))

        spec = decode_spec(made.spec)

        assert made.features == ("tools",)
        assert (spec.tool_choice, spec.parallel_tool_calls) == ("required", False)
        assert spec.tools == stored_tools([CHAT_TOOL])

    @pytest.mark.parametrize(("options", "words"), WRONG, ids=range(len(WRONG)))
    def test_when_a_value_is_wrong_then_the_error_names_the_option(self, options: Any, words: str) -> None:
        with pytest.raises(InvalidJob, match=words):
            template(options)

    @pytest.mark.parametrize("tools", [["x"], ["{}"], [5], "x", {"a": 1}])
    def test_when_another_program_has_written_them_then_they_are_refused(self, tools: object) -> None:
        from sluice.protocol.packing import WIRE_VERSION, packed

        with pytest.raises(WireError):
            decode_spec(packed([WIRE_VERSION, {"tools": tools}]))

    def test_when_a_job_has_none_then_it_needs_nothing(self) -> None:
        assert JobSpec(options=JobOptions(max_tokens=3)).features == ()


class TestGivenMessagesAboutCalls:
    def test_when_they_are_openais_then_they_become_messages(self) -> None:
        prompt = as_prompt(
            [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
                {"role": "tool", "content": "5", "tool_call_id": "c"},
            ]
        )

        assert prompt[1:] == (
            Message(
                role="assistant",
                content="",
                reasoning="Hm.",
                tool_calls=(ToolCall(id="c", name="f", arguments='{"a": 1}'),),
            ),
            Message(role="tool", content="5", tool_call_id="c"),
        )
        assert decode_prompt(encode_prompt(prompt)) == prompt

    @pytest.mark.parametrize(
        ("message", "words"),
        [
            ({"role": "assistant"}, "content is missing"),
            ({"role": "assistant", "content": None}, "content must be text"),
            ({"role": "assistant", "tool_calls": [1]}, "list of calls"),
            ({"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}, "type 'function'"),
            ({"role": "assistant", "tool_calls": [{**CALL, "id": None}]}, "must have an id"),
            (
                {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[]"}}]},
                "JSON object",
            ),
            (
                {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]},
                "JSON object",
            ),
            ({"role": "user", "content": "a", "tool_calls": [CALL]}, "only a message of role assistant"),
            ({"role": "user", "content": "a", "tool_call_id": "c"}, "only a message of role tool"),
        ],
        ids=range(9),
    )
    def test_when_one_is_wrong_then_the_error_says_so(self, message: object, words: str) -> None:
        with pytest.raises(InvalidJob, match=words):
            as_prompt([message])
