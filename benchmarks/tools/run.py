"""Let a real model call the functions of a leaderboard, and judge its calls by their schemas.

    python -m benchmarks tools [--questions 20] [--model DIR]

Each question is asked with a call required, with calls allowed (`auto`), and without a grammar, where the answer is
begun as a call, since a small model begins none by itself, and ends with its first one. A call is valid if it has the
name of a function and arguments that match its schema; an answer is right if its calls are those of the leaderboard.
Needs `python -m tools.real_model smollm2` once.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from benchmarks.tables import table
from benchmarks.tools.questions import CATEGORIES, Question, questions
from sluice.engine.request import FinishReason, Request
from sluice.protocol.jobs import as_prompt
from sluice.protocol.messages import JobSpec
from sluice.protocol.outputs.parser import FunctionCall, ParsedOutput, parse_output
from sluice.protocol.sampling import JobOptions
from sluice.protocol.tools import stored_tools
from sluice.worker.config import load_config
from sluice.worker.model.load import load
from sluice.worker.model.loaded_model import LocalModel
from sluice.worker.model.translate import TokenizedPrompt
from tools.real_model.folder import real_model_folder

FREE = "begun, no grammar"
MODES = {FREE: "required", "auto": "auto", "required": "required"}
"""By name: the choice of tools."""

BEGIN, END = '<tool_call>\n{"name": "', "</tool_call>"

MAX_TOKENS = 256


@dataclass(slots=True, eq=False)
class Counts:
    """What became of the questions of one category. Mutable."""

    asked: int = 0
    cut: int = 0
    """Answers that reached `MAX_TOKENS`."""

    called: int = 0
    """Other answers that call a function."""

    calls: int = 0
    """Calls in these."""

    valid: int = 0
    right: int = 0

    def add(self, question: Question, output: ParsedOutput, *, is_cut: bool) -> None:
        """Count an answer."""
        self.asked += 1
        self.cut += is_cut
        if is_cut or not output.calls:
            return
        self.called += 1
        self.calls += len(output.calls)
        self.valid += sum(is_valid(call, question.functions) for call in output.calls)
        self.right += is_right(output.calls, question)


def is_valid(call: FunctionCall, functions: Sequence[dict[str, Any]]) -> bool:
    """Return whether a call is one of a function, with arguments that match its schema."""
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in functions}
    try:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    except (KeyError, ValueError, jsonschema.ValidationError):
        return False
    return True


def is_right(calls: Sequence[FunctionCall], question: Question) -> bool:
    """Return whether calls are the right ones, in any order."""
    left = list(question.right)
    for call in calls:
        found = next((one for one in left if _matches(call, one)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _matches(call: FunctionCall, right: dict[str, dict[str, list[Any]]]) -> bool:
    [(name, values)] = right.items()
    try:
        given = json.loads(call.arguments)
    except ValueError:
        return False
    is_known = call.name == name and isinstance(given, dict) and given.keys() <= values.keys()
    return is_known and all(given.get(key, "") in possible for key, possible in values.items())


def answers(model: LocalModel, asked: Sequence[Question], mode: str) -> list[tuple[ParsedOutput, bool]]:
    """Return the answers to questions, each taken apart, and whether it was cut off."""
    encoded = [_encoded(model, question, mode) for question in asked]
    is_free = mode == FREE
    options = JobOptions(max_tokens=MAX_TOKENS, temperature=0.0, stop=(END,) if is_free else ())
    begin = model.encode(BEGIN, add_special_tokens=False) if is_free else []
    for number, prompt in enumerate(encoded):
        token_ids = (*prompt.token_ids, *begin)
        sampling = prompt.sampling(options, model.translator.resolve(options, len(token_ids)), seed=number)
        grammar = None if is_free else prompt.grammar
        request = Request(id=str(number), prompt_token_ids=token_ids, is_chat=True, sampling=sampling, grammar=grammar)
        model.validate(request)
        model.engine.add([request])
    texts, reasons = [BEGIN if is_free else ""] * len(asked), [FinishReason.ERROR] * len(asked)
    while not model.engine.is_idle:
        for delta in model.engine.advance():
            texts[int(delta.request_id)] += delta.text
            if delta.finish is not None:
                assert delta.finish.error is None, delta.finish.error
                reasons[int(delta.request_id)] = delta.finish.reason
    return [
        (parse_output(prompt.output_format, text), reason is FinishReason.LENGTH)
        for prompt, text, reason in zip(encoded, texts, reasons, strict=True)
    ]


def _encoded(model: LocalModel, question: Question, mode: str) -> TokenizedPrompt:
    spec = JobSpec(
        options=JobOptions(max_tokens=MAX_TOKENS),
        tools=stored_tools(question.functions),
        tool_choice=MODES[mode],
        parallel_tool_calls=question.category == "parallel",
    )
    return model.translator.encoded(as_prompt(question.messages), spec, now_ms=0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=20, help="Questions of each category.")
    parser.add_argument("--model", help="Folder of the model. SmolLM2-135M-Instruct if not given.")
    given = parser.parse_args()
    flags = {
        "model.path": given.model or str(real_model_folder()),
        "model.tool_format": "hermes",
        "model.max_model_len": 4096,
    }
    model, asked = load(load_config({}, flags=flags)), questions(given.questions)
    rows: list[list[str]] = []
    for mode in MODES:
        begin_s = time.monotonic()
        counts = {category: Counts() for category in CATEGORIES}
        for question, (output, is_cut) in zip(asked, answers(model, asked, mode), strict=True):
            counts[question.category].add(question, output, is_cut=is_cut)
        print(f"{mode}: {time.monotonic() - begin_s:.0f} s", flush=True)
        rows += [_row(mode, category, of) for category, of in counts.items()]
    head = ["tools", "category", "asked", "cut off", "answers with calls", "calls", "valid", "right"]
    print(table([head, *rows]))


def _row(mode: str, category: str, counts: Counts) -> list[str]:
    share = f"{counts.valid} ({counts.valid / counts.calls:.0%})" if counts.calls else "0"
    numbers = (counts.asked, counts.cut, counts.called, counts.calls)
    return [mode, category, *map(str, numbers), share, str(counts.right)]
