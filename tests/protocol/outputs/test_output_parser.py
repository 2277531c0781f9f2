"""How texts of models are taken apart, in any pieces."""

import json
import re
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sluice.protocol.outputs import parser as parser_module
from sluice.protocol.outputs.formats import CALL_FORMATS, OutputFormat
from sluice.protocol.outputs.parser import FunctionCall, OutputParser, ParsedOutput, Part, joined, parse_output
from tests.examples import examples

CALL = '{"name": "f", "arguments": {"a": [1, "}\\""]}}'
F = FunctionCall("f", '{"a": [1, "}\\""]}')
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
LLAMA = CALL.replace("arguments", "parameters")

PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", "[", "]", ",", ";", "<"),
    *(
        CALL,
        LLAMA,
        '{"name": "f"}',
        '{"arguments": {"x": 1}, "name": "g"}',
        '{"name": 3}',
        '{"name": "f", "arguments": ',
    ),
    *('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"other": null, "name": "é", "parameters": {"b": "\\\\"}}'),
    *("{", "}", '"', "\\", " ", "\n", "\n\n", "hello", "é\U0001f600", " <tool", "_call>", "</thi", "nk>", ":"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
FORMATS = [
    OutputFormat(calls=calls, reasoning=reasoning)
    for calls in ("", *CALL_FORMATS)
    for reasoning in ("", "think", "open_think")
]


def parsed(name: str, text: str) -> ParsedOutput:
    return parse_output(OutputFormat.read(name), text)


def output(content: str = "", *calls: FunctionCall, reasoning: str | None = None) -> ParsedOutput:
    return ParsedOutput(content=content, reasoning=reasoning, calls=calls)


def merged(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind as one part, known with its last character."""
    made: list[Part] = []
    for part in parts:
        if made and made[-1].kind == part.kind != "call":
            before = made.pop()
            part = part._replace(text=before.text + part.text, begin=before.begin)
        made.append(part)
    return made


class TestGivenAnyText:
    """Whatever its marks, whole or not."""

    @given(output_format=st.sampled_from(FORMATS), text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=8))
    @hypothesis_settings(max_examples=examples(3000), deadline=None)
    def test_when_it_comes_in_pieces_then_the_parts_are_those_of_its_characters(
        self, output_format: OutputFormat, text: str, cuts: list[int]
    ) -> None:
        places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
        by_pieces, by_characters = OutputParser(output_format), OutputParser(output_format)

        for begin, end in pairwise(places):
            pieces = by_pieces.push(text[begin:end])
            characters = [part for character in text[begin:end] for part in by_characters.push(character)]

            assert pieces == merged(characters)

        assert by_pieces.finish() == by_characters.finish()

    @given(output_format=st.sampled_from(FORMATS), text=TEXTS)
    @hypothesis_settings(max_examples=examples(1000), deadline=None)
    def test_when_it_is_read_amid_then_the_rest_completes_what_was_read(
        self, output_format: OutputFormat, text: str
    ) -> None:
        whole = parse_output(output_format, text)

        for place in range(len(text) + 1):
            parser = OutputParser(output_format)
            before = parser.push(text[:place])
            after = [*parser.push(text[place:]), *parser.finish()]
            assert joined([*before, *after]) == whole
            assert all(part.at <= place for part in before)
            assert all(part.at >= place for part in after)

    @given(text=TEXTS)
    def test_when_nothing_is_marked_then_all_is_content(self, text: str) -> None:
        assert parsed("", text) == output(text)

    @given(
        calls=st.sampled_from(["hermes", "mistral", "llama3"]),
        text=st.lists(
            st.sampled_from([*"abc\n {}[]<>é", "<tool_call>", "[TOOL_CALLS] x", "<|python_tag|>"]), max_size=20
        )
        .map("".join)
        # Brackets and commas after the mark are those of a list of calls.
        .filter(lambda text: not re.search(r"TOOL_CALLS\][^x]*x?[\s\[,]*\]", text)),
    )
    @hypothesis_settings(max_examples=examples(500))
    def test_when_it_has_no_call_then_it_is_content_as_it_is(self, calls: str, text: str) -> None:
        assert parsed(calls, text) == output(text)

    @given(
        calls=st.lists(
            st.tuples(st.text(min_size=1, max_size=9), st.dictionaries(st.text(), st.integers() | st.text())),
            min_size=1,
            max_size=4,
        ),
        name=st.sampled_from(CALL_FORMATS),
    )
    @hypothesis_settings(max_examples=examples(300), deadline=None)
    def test_when_calls_are_written_then_they_are_read(
        self, calls: list[tuple[str, dict[str, object]]], name: str
    ) -> None:
        key = "parameters" if name == "llama3" else "arguments"
        written = [json.dumps({"name": call, key: arguments}) for call, arguments in calls]
        text = {
            "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written),
            "mistral": f"[TOOL_CALLS][{', '.join(written)}]",
            "llama3": "; ".join(written),
        }[name]

        assert [(call.name, json.loads(call.arguments)) for call in parsed(name, text).calls] == calls

    @given(
        value=st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.text(max_size=3)
            | st.sampled_from(["{}", '{"a": 1}', "[1]"]),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
            max_leaves=4,
        ),
        has_name_first=st.booleans(),
    )
    @hypothesis_settings(max_examples=examples(500))
    def test_when_a_call_has_other_arguments_than_an_object_then_it_is_content(
        self, value: object, has_name_first: bool
    ) -> None:
        written = json.dumps({"name": "f", "arguments": value} if has_name_first else {"arguments": value, "name": "f"})
        text = f"<tool_call>{written}"

        found = parsed("hermes", text)

        inner = value
        if isinstance(value, str):
            with suppress(ValueError):
                inner = json.loads(value)
        if isinstance(inner, dict):
            assert [json.loads(call.arguments) for call in found.calls] == [inner]
        else:
            assert found == output(text)

    @pytest.mark.parametrize("name", CALL_FORMATS)
    def test_when_it_is_long_then_its_characters_are_joined_once(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        num_joined = 0

        def counted(*fields: Any) -> Part:  # Any: those of a part
            nonlocal num_joined
            made = Part(*fields)
            num_joined += len(made.text)
            return made

        monkeypatch.setattr(parser_module, "Part", counted)
        mark = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS][", "llama3": ""}[name]
        text = f'{mark}{{"name": "f", "parameters": {{"a": "{"x" * 20_000}"}}}}'

        [call] = parsed(name, text).calls

        assert num_joined == len("f") + len(call.arguments)


class TestGivenTextsOfEachFormat:
    @pytest.mark.parametrize(
        ("name", "text", "expected"),
        [
            ("hermes", HERMES, output("", F)),
            ("hermes", f"Let me see.\n\n{HERMES}\n{HERMES}\n", output("Let me see.", F, F)),
            ("hermes", f"{HERMES} Done.", output("Done.", F)),
            ("hermes", '<tool_call>{"name": "f"}</tool_call>', output("", FunctionCall("f", "{}"))),
            ("hermes", '<tool_call>{"name": "f", "arguments": {"a', output("", FunctionCall("f", '{"a'))),
            ("hermes", '<tool_call>{"nam', output('<tool_call>{"nam')),
            ("hermes", "a <tool_call> b", output("a <tool_call> b")),
            ("hermes", " \n<tool_call> b", output(" \n<tool_call> b")),
            ("think+hermes", "<think>a</think>\n\nb\n<tool_call> c", output("b\n<tool_call> c", reasoning="a")),
            ("hermes", f"{HERMES}\nb <tool_call> c", output("b <tool_call> c", F)),
            ("mistral", "a\n[TOOL_CALLS] b", output("a\n[TOOL_CALLS] b")),
            ("llama3", " <|python_tag|> b", output(" <|python_tag|> b")),
            (
                "hermes",
                '<tool_call>{"name": "f", "arguments": [1]}',
                output('<tool_call>{"name": "f", "arguments": [1]}'),
            ),
            (
                "hermes",
                '<tool_call>{"name": "f", "arguments": null}',
                output('<tool_call>{"name": "f", "arguments": null}'),
            ),
            ("hermes", '<tool_call>{"name": "f", "arguments": ,}', output('<tool_call>{"name": "f", "arguments": ,}')),
            (
                "hermes",
                '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}',
                output("", FunctionCall("f", '{"a": 1}')),
            ),
            (
                "hermes",
                '<tool_call>{"name": "f", "arguments": {}, "parameters": {"a": 1}}',
                output("", FunctionCall("f", "{}")),
            ),
            ("hermes", '<tool_call>{"name": "f", "name": "g"}', output("", FunctionCall("f", "{}"))),
            ("hermes", '<tool_call>{"name": "f", "argum', output("", FunctionCall("f", ""))),
            ("hermes", '<tool_call>{"name": 3}</tool_call>', output('<tool_call>{"name": 3}</tool_call>')),
            ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}</tool_call>", output("", F, F)),
            ("hermes", "1 < 2", output("1 < 2")),
            ("hermes", " x ", output(" x ")),
            ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", output("", F, F)),
            ("mistral", f"Now: [TOOL_CALLS][{CALL}", output("Now:", F)),
            ("llama3", LLAMA, output("", F)),
            ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}", output("", F, F)),
            ("llama3", "a {b}", output("a {b}")),
            ("llama3", '{"a": 1}', output('{"a": 1}')),
            ("think", "<think>\nHm.\n</think>\n\nYes.", output("Yes.", reasoning="Hm.")),
            ("think", "Yes <think>no</think>", output("Yes <think>no</think>")),
            ("open_think", "Hm.</think>Yes.", output("Yes.", reasoning="Hm.")),
            ("open_think", "Hm. ", output("", reasoning="Hm. ")),
            ("think+hermes", f"<think>{HERMES}</think>{HERMES}", output("", F, reasoning=HERMES)),
            ("open_think+llama3", f"a</think>\n{LLAMA}", output("", F, reasoning="a")),
        ],
        ids=range(35),
    )
    def test_when_one_is_parsed_then_its_parts_are_told_apart(
        self, name: str, text: str, expected: ParsedOutput
    ) -> None:
        assert parsed(name, text) == expected

    def test_when_a_call_is_streamed_then_its_name_comes_first_and_arguments_as_they_are_written(self) -> None:
        parser = OutputParser(OutputFormat(calls="hermes"))

        parts = [
            part
            for piece in ("<tool_call>{", '"name": "f"', ', "argu', 'ments": {"a"', ": 1}", "}")
            for part in parser.push(piece)
        ]

        assert [(part.kind, part.text) for part in parts] == [
            ("call", "f"), ("arguments", '{"a"'), ("arguments", ": 1}"),
        ]  # fmt: skip

    def test_when_white_space_has_no_end_then_it_is_shown(self) -> None:
        parser = OutputParser(OutputFormat(calls="hermes"))

        shown = [parser.push(" " * 100) for _ in range(10)]

        assert sum(len(part.text) for parts in shown for part in parts) >= 700

    def test_when_its_name_is_read_again_then_it_is_the_same_format(self) -> None:
        assert [OutputFormat.read(str(one)) for one in FORMATS] == FORMATS

    def test_when_its_name_is_unknown_then_all_is_content(self) -> None:
        assert parsed("harmony", HERMES) == output(HERMES)
