"""The grammar of an answer takes what its format allows, and nothing else."""

from dataclasses import replace
from typing import Any

import pytest

from sluice.engine.errors import InvalidGrammar
from sluice.engine.null_model import NullModel
from sluice.engine.request import Grammar, GrammarPart
from sluice.engine.sampling import MAX_GRAMMAR_CHARS
from sluice.engine.text.grammars import Compiler
from sluice.engine.text.matcher import CompiledGrammar
from sluice.engine.text.tokenizer import Tokenizer, load_tokenizer
from sluice.engine.validation import check_request
from sluice.protocol.limits import MAX_STRUCTURED_CHARS
from sluice.protocol.outputs.formats import OutputFormat
from sluice.protocol.tools import Function, functions_of, stored_tools
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.model.tool_grammars import answer_grammar
from sluice.worker.model.tool_prompts import JobTools
from tests.engine.given import request

SCHEMA = {
    "properties": {"city": {"type": "string", "maxLength": 20}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = [
    Function(name="f", parameters=SCHEMA),
    Function(name="g.h"),
    Function(name="loose", parameters=SCHEMA, is_strict=False),
]
CALL = '{"name": "f", "arguments": {"city": "x", "n": 3}}'
LLAMA = CALL.replace("arguments", "parameters")
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
OTHER = HERMES.replace(CALL, '{"name": "g.h", "arguments": {}}')
LOOSE = HERMES.replace(CALL, '{"name": "loose", "arguments": {"q": [1]}}')

AUTO, REQUIRED = JobTools(functions=FUNCTIONS), JobTools(functions=FUNCTIONS, is_required=True)
ONE, NAMED = (
    JobTools(functions=FUNCTIONS, is_parallel=False),
    JobTools(functions=FUNCTIONS, is_required=True, named="f"),
)
END, OPEN, LEFT = "may end", "must go on", "left"

TOKENIZER: Tokenizer = load_tokenizer(SMALL_MODEL)
"""Its first tokens are special."""

_COMPILER = Compiler(TOKENIZER, TOKENIZER.vocab_size)


def compiled(grammar: Grammar) -> CompiledGrammar:
    """Compile on the compiler's thread."""
    _COMPILER.add(request("a"), grammar)
    while not (ready := _COMPILER.take_ready()):
        pass
    [(_, result)] = ready
    assert isinstance(result, CompiledGrammar)
    return result


def ids_of(*parts: str | int) -> list[int]:
    """The tokens of texts, and special tokens."""
    texts = [[part] if isinstance(part, int) else TOKENIZER.encode(part, add_special_tokens=False) for part in parts]
    return [token_id for text in texts for token_id in text]


def verdict(grammar: Grammar | None, token_ids: list[int]) -> str:
    """Whether the grammar takes the tokens, and whether the text may end after them."""
    assert grammar is not None
    matcher, end = compiled(grammar).matcher_of_choice(), TOKENIZER.vocab_size - 1
    for token_id in token_ids:
        if not matcher.mask([])[token_id >> 3] >> (token_id & 7) & 1:
            return LEFT
        matcher.take(token_id)
        assert matcher.problem is None
    return END if matcher.mask([end])[end >> 3] >> (end & 7) & 1 else OPEN


class TestGivenAFormat:
    @pytest.mark.parametrize(
        ("name", "tools", "text", "expected"),
        [
            ("hermes", AUTO, "hello", END),
            ("hermes", AUTO, f"hello\n{HERMES}\n{OTHER}{LOOSE}", END),
            ("hermes", AUTO, f"{HERMES} bye", LEFT),
            ("hermes", AUTO, "a <tool_call> x", LEFT),
            ("hermes", AUTO, "a <tool_call>", OPEN),
            ("hermes", ONE, HERMES, END),
            ("hermes", ONE, HERMES + HERMES, LEFT),
            ("hermes", REQUIRED, "hello", LEFT),
            ("hermes", REQUIRED, "", OPEN),
            ("hermes", REQUIRED, f"{HERMES}\n{OTHER}", END),
            ("hermes", REQUIRED, HERMES.replace('"x"', "3"), LEFT),
            ("hermes", NAMED, HERMES, END),
            ("hermes", NAMED, OTHER, LEFT),
            ("think+hermes", AUTO, f"<think> {HERMES[:20]} </think>\n\n{HERMES}", END),
            ("think+hermes", AUTO, "<think> a </think>\n\nyes", END),
            ("think+hermes", AUTO, "<think> a", OPEN),
            ("think+hermes", AUTO, f"yes {HERMES}", END),
            ("think+hermes", REQUIRED, f"<think>a</think>{HERMES}", END),
            ("think+hermes", REQUIRED, HERMES, END),
            ("open_think+hermes", AUTO, f"a {HERMES[:20]} </think>\n\nyes {HERMES}", END),
            ("open_think+hermes", AUTO, "a", OPEN),
            ("open_think+hermes", REQUIRED, "a</think>b", LEFT),
            ("llama3", AUTO, "hello {", END),
            ("llama3", AUTO, f"{LLAMA}; {LLAMA}", END),
            ("llama3", AUTO, "{x", LEFT),
            ("llama3", REQUIRED, "h", LEFT),
            ("llama3", REQUIRED, LLAMA, END),
            ("llama3", ONE, f"{LLAMA}; ", LEFT),
            ("open_think+llama3", REQUIRED, f"x</think>\n\n{LLAMA}", END),
            ("open_think+llama3", AUTO, "x</think>\n\nyes", END),
            ("mistral", AUTO, f"see [TOOL_CALLS][{CALL}, {CALL}]", END),
            ("mistral", AUTO, "see", END),
            ("mistral", REQUIRED, f"[TOOL_CALLS][{CALL}, {CALL}]", END),
            ("mistral", ONE, f"[TOOL_CALLS][{CALL}, ", LEFT),
        ],
        ids=range(34),
    )
    def test_when_an_answer_is_matched_then_it_is_taken_or_left(
        self, name: str, tools: JobTools, text: str, expected: str
    ) -> None:
        grammar = answer_grammar(OutputFormat.read(name), tools, None, {})

        assert verdict(grammar, ids_of(text)) == expected

    @pytest.mark.parametrize(
        ("name", "tools", "marks", "parts"),
        [
            ("mistral", AUTO, {"[TOOL_CALLS]": 2}, ["see", 2, f"[{CALL}]"]),
            ("mistral", REQUIRED, {"[TOOL_CALLS]": 2}, [2, f"[{CALL}]"]),
            ("hermes", AUTO, {"<tool_call>": 2, "</tool_call>": 3}, ["see", 2, f"\n{CALL}\n", 3]),
            ("hermes", REQUIRED, {"<tool_call>": 2, "</tool_call>": 3}, [2, f"\n{CALL}\n", 3, 2, f"\n{CALL}\n", 3]),
            ("think+hermes", AUTO, {"<think>": 4, "</think>": 5}, [4, "see <tool_call> ", 5, f"\n{HERMES}"]),
            ("open_think+hermes", AUTO, {"</think>": 5}, ["see", 5, "see"]),
            ("llama3", AUTO, {"<|python_tag|>": 4}, [4, LLAMA]),
        ],
        ids=range(7),
    )
    def test_when_marks_are_special_tokens_then_those_are_taken(
        self, name: str, tools: JobTools, marks: dict[str, int], parts: list[str | int]
    ) -> None:
        grammar = answer_grammar(OutputFormat.read(name), tools, None, marks)

        assert verdict(grammar, ids_of(*parts)) == END


class TestGivenFunctionsOfTheGreatestSize:
    """Their JSON, which has many quotes, is as long as it may be."""

    def test_when_an_answer_may_call_them_then_its_grammar_is_not_too_long(self) -> None:
        properties = {f"p{number}": {"type": "string"} for number in range(4_900)}
        stored = stored_tools(
            [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
        )
        body = Grammar(kind="lark", text='start: "' + "\\" * 60_000 + '"')
        assert 0.9 < len(stored[0]) / MAX_STRUCTURED_CHARS <= 1

        grammar = answer_grammar(OutputFormat(calls="hermes"), JobTools(functions=functions_of(stored)), body, {})

        assert grammar is not None
        assert len(grammar.text) > 2 * MAX_GRAMMAR_CHARS
        check_request(replace(request("a"), grammar=grammar), NullModel().limits)

    def test_when_one_is_too_long_then_its_length_is_said(self) -> None:
        parts: list[GrammarPart] = [("start", "lark", "start: @body"), ("body", "regex", "a" * (MAX_GRAMMAR_CHARS + 1))]

        with pytest.raises(InvalidGrammar, match=f"has {MAX_GRAMMAR_CHARS + 1} characters"):
            check_request(replace(request("a"), grammar=Grammar.composed(parts)), NullModel().limits)


class TestGivenASchemaOfAFunction:
    @pytest.mark.parametrize(
        ("parameters", "expected"), [(None, LEFT), ({}, END), ({"type": "object"}, END)], ids=["none", "any", "object"]
    )
    def test_when_it_is_empty_then_it_allows_any_object_unlike_none(
        self, parameters: dict[str, object] | None, expected: str
    ) -> None:
        tools = JobTools(functions=[Function(name="f", parameters=parameters)])
        grammar = answer_grammar(OutputFormat(calls="hermes"), tools, None, {})

        assert verdict(grammar, ids_of(HERMES)) == expected


class TestGivenABody:
    """What the answer must match if it calls no function."""

    @pytest.mark.parametrize(
        ("kind", "body", "text", "expected"),
        [
            ("json_schema", '{"type": "object"}', '{"a": 1}', END),
            ("json_schema", '{"type": "object"}', HERMES, END),
            ("json_schema", '{"type": "object"}', "yes", LEFT),
            ("regex", "a.", "ab", END),
            ("choice", '["yes", "no"]', "yes", END),
            ("lark", 'start: "{" "x"', "{x", END),
            ("json_object", "", "{}", END),
        ],
        ids=range(7),
    )
    def test_when_tools_may_be_called_then_both_are_taken(self, kind: Any, body: str, text: str, expected: str) -> None:
        grammar = answer_grammar(OutputFormat(calls="hermes"), AUTO, Grammar(kind=kind, text=body), {})

        assert verdict(grammar, ids_of(text)) == expected

    @pytest.mark.parametrize("name", ["think", "open_think"])
    def test_when_it_may_think_then_the_body_follows_the_thoughts(self, name: str) -> None:
        grammar = answer_grammar(OutputFormat.read(name), JobTools(), Grammar(kind="choice", text='["yes"]'), {})
        begin = "<think>" if name == "think" else ""

        assert verdict(grammar, ids_of(f"{begin}Hm.</think>\nyes")) == END
        assert verdict(grammar, ids_of(f"{begin}Hm.</think>\nno")) == LEFT

    def test_when_nothing_is_marked_then_it_is_the_grammar(self) -> None:
        body = Grammar(kind="regex", text="a")

        assert answer_grammar(OutputFormat(calls="hermes"), JobTools(), body, {}) is body
        assert answer_grammar(OutputFormat(reasoning="think"), JobTools(), None, {}) is None
