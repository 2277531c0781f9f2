"""The grammar of an answer whose text has marks: what may come before the calls, and what each call must be.

Read `answer_grammar` first. The rules are in llguidance's form of Lark. A lazy rule ends at the first place where it
matches, so free text ends where a mark begins, and what follows must be a call.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sluice.engine.request import Grammar, GrammarPart
from sluice.protocol.outputs.formats import (
    HERMES_CALL,
    HERMES_END,
    MISTRAL_CALLS,
    PYTHON_TAG,
    THINK,
    THOUGHT,
    OutputFormat,
)
from sluice.protocol.tools import Function
from sluice.worker.model.tool_prompts import JobTools

_ANY = r"(.|\n)*"
_NO_BRACE_FIRST = rf"[ \n]*([^ \n{{]{_ANY})?"
_MORE_CALLS = "(SPACE first_call)*"
_OPENING = json.dumps('{"name": ')
_NO_ARGUMENTS: Mapping[str, object] = {"properties": {}, "additionalProperties": False}


def answer_grammar(
    output_format: OutputFormat, tools: JobTools, body: Grammar | None, mark_ids: Mapping[str, int]
) -> Grammar | None:
    """Return the grammar of an answer; None if it may be any text.

    Args:
        output_format: How the answer marks its parts.
        tools: The functions that it may call.
        body: What it must match if it calls none; None: any text.
        mark_ids: The marks that are special tokens.
    """
    if not tools.functions and (body is None or not output_format.reasoning):
        return body
    rules = _Rules(output_format, tools, body is not None, mark_ids)
    parts: list[GrammarPart] = [("start", "lark", rules.text)]
    if body is not None and not tools.is_required:
        # A body that is composed does not exist: users cannot ask for one.
        parts.append(("body", body.kind, body.text))
    parts += [_arguments(rules.name(number), one) for number, one in enumerate(tools.callable)]
    return Grammar.composed(parts)


def _arguments(name: str, function: Function) -> GrammarPart:
    if not function.is_strict:
        return name, "json_object", ""
    parameters = _NO_ARGUMENTS if function.parameters is None else function.parameters
    schema = {"type": "object", **parameters}
    return name, "json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules around thoughts, content and calls."""

    output_format: OutputFormat
    tools: JobTools
    has_body: bool
    mark_ids: Mapping[str, int]

    @property
    def text(self) -> str:
        """The grammar. It refers to `@body`, and to the arguments of functions by their names."""
        return "\n".join(
            ("%llguidance {}", *self._start(), *self._answer(), *self._calls(), "SPACE: /[ \\n]{0,2}/", "")
        )

    def name(self, number: int) -> str:
        """Return the name of the grammar of a function's arguments."""
        return f"{re.sub('[^A-Za-z0-9]', '_', self.tools.callable[number].name)}_{number}"

    def _start(self) -> Iterator[str]:
        match self.output_format.reasoning:
            case "open_think":
                yield "start: thought SPACE answer"
                yield self._until("thought", f"/{_ANY}/", THOUGHT)
            case "think":
                # An answer without a thought may not begin as one, or what is called amid a thought would be a call.
                yield "start: opened thought SPACE answer | answer"
                yield f"opened: {self._mark(THINK)}"
                yield self._until("thought", f"/{_ANY}/", THOUGHT)
            case _:
                yield "start: answer"

    def _answer(self) -> Iterator[str]:
        """Yield the rules of what follows the thoughts: text, or calls, or text and then calls."""
        if not self.tools.functions:
            yield "answer: @body"
        elif self.tools.is_required:
            yield "answer: first_call more"
        elif self.has_body:
            yield "answer: @body | first_call more"
        elif self.output_format.calls == "llama3":
            yield "answer: TEXT | first_call more"
            yield f"TEXT: {self._not_a_thought(_NO_BRACE_FIRST)}"
        else:
            yield "answer: TEXT | until_call after_mark more"
            yield f"TEXT: {self._not_a_thought(_ANY)}"
            yield self._until("until_call", "TEXT", self._call_mark)

    def _not_a_thought(self, pattern: str) -> str:
        is_text = self.output_format.reasoning == "think" and THINK not in self.mark_ids
        return f"/{pattern}/ & ~/[ \\n]*{THINK}{_ANY}/" if is_text else f"/{pattern}/"

    def _calls(self) -> Iterator[str]:
        if not self.tools.functions:
            return
        others = {"mistral": '(", " call)*', "llama3": '("; " call)*'}.get(self.output_format.calls, _MORE_CALLS)
        others = others if self.tools.is_parallel else '""'
        match self.output_format.calls:
            case "mistral":
                yield f"first_call: {self._mark(MISTRAL_CALLS)} after_mark"
                yield f'after_mark: "[" call {others} "]"'
                yield 'more: ""'
            case "llama3":
                tag = f"{self._mark(PYTHON_TAG)}? " if PYTHON_TAG in self.mark_ids else ""
                yield f"first_call: SPACE {tag}call"
                yield f"more: {others}"
            case _:
                yield f"first_call: {self._mark(HERMES_CALL)} after_mark"
                yield f'after_mark: "\\n" call "\\n" {self._mark(HERMES_END)}'
                yield f"more: {others}"
        yield from self._call()

    def _call(self) -> Iterator[str]:
        key = "parameters" if self.output_format.calls == "llama3" else "arguments"
        names = [json.dumps(f'"{one.name}", "{key}": ') for one in self.tools.callable]
        calls = " | ".join(f"{name} @{self.name(number)}" for number, name in enumerate(names))
        yield f'call: {_OPENING} ({calls}) "}}"'

    @property
    def _call_mark(self) -> str:
        return MISTRAL_CALLS if self.output_format.calls == "mistral" else HERMES_CALL

    def _mark(self, mark: str) -> str:
        return f"<[{self.mark_ids[mark]}]>" if mark in self.mark_ids else json.dumps(mark)

    def _until(self, name: str, text: str, mark: str) -> str:
        """Return the rule of text up to a mark. Only a rule without special tokens can be lazy."""
        is_lazy = "" if mark in self.mark_ids else "[lazy]"
        return f"{name}{is_lazy}: {text} {self._mark(mark)}"
