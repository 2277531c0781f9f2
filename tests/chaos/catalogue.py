"""The soak's catalogue of requests, its producers' journals, and the reference run of the catalogue.

A catalogue is a few hundred different requests drawn from a seed. Jobs are drawn from the catalogue, so a reference run
of the catalogue alone has the expected output of every job. `checker/evidence.py` reads the files.
"""

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from sluice.producer.client import Producer
from sluice.protocol.jobs import Job, Options, PromptLike
from sluice.protocol.wire import JobResult

WORDS = ("river", "lamp", "seven", "write", "a story", "of", "the", "small", "cat", "und", "größer", "then", "what")
STOPS = ("e", "th", "qu", "\n\n")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "is_here": {"type": "boolean"},
    },
    "required": ["name", "age", "is_here"],
    "additionalProperties": False,
}


TOOL = {"type": "function", "function": {"name": "meet", "parameters": PERSON}}
READ: Sequence[Options] = (
    {"embed": True},
    {"embed": True, "dimensions": 4},
    {"max_tokens": 0, "prompt_logprobs": 1},
)
"""Options of jobs that read hidden states of their prompts, and generate nothing."""

CALLING_SHARE, READING_SHARE = 0.1, 0.1


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the catalogue."""

    prompt: PromptLike
    options: Options

    def job(self, **own: Unpack[Options]) -> Job:
        """Make a job of this request, with further options that do not change its output."""
        return Job(self.prompt, {**self.options, **own})


def catalogue(seed: int, size: int, *, max_tokens: int = 60, temperatures: Sequence[float] = (0.0, 1.0)) -> list[Ask]:
    """Draw requests that differ in prompt, seed, length, choices, stops, penalties, schema, tools, and what is read."""
    dice = random.Random(seed)
    return [_ask(dice, max_tokens, temperatures) for _ in range(size)]


def catalogue_of(text: str) -> list[Ask]:
    """The catalogue of `seed:size:max_tokens`, as it stands on a command line."""
    seed, size, max_tokens = map(int, text.split(":"))
    return catalogue(seed, size, max_tokens=max_tokens)


def _ask(dice: random.Random, max_tokens: int, temperatures: Sequence[float]) -> Ask:
    options: Options = {
        "max_tokens": dice.randrange(1, max_tokens + 1),
        "seed": dice.randrange(2**64),
        "n": dice.choice([1, 1, 1, 1, 2, 3]),
        "temperature": dice.choice(temperatures),
        "ignore_eos": dice.random() < 0.7,
    }
    if dice.random() < 0.2:
        options["stop"] = [dice.choice(STOPS)]
    if dice.random() < 0.1:
        options["repetition_penalty"] = 1.2
    if dice.random() < 0.2:
        # Its end is the end of the output.
        options |= {"structured": {"json_schema": PERSON}, "ignore_eos": False}
    text = " ".join(dice.choices(WORDS, k=dice.randrange(1, 30)))
    kind = dice.random()
    if kind < CALLING_SHARE and "structured" not in options:
        choice = dice.choice(("auto", "required"))
        options |= {"tools": [TOOL], "tool_choice": choice, "ignore_eos": False}
        return Ask([{"role": "user", "content": text}], options)
    if kind > 1 - READING_SHARE:
        return Ask(text, dice.choice(READ))
    return Ask(text, options)


# ---------------------------------------------------------------- undisturbed


def write_reference(producer: Producer, asks: Sequence[Ask], path: Path) -> None:
    """Run the catalogue once without faults, and store its output."""
    receipts = list(producer.submit_many(ask.job() for ask in asks))
    outputs = [_output(producer.result(str(receipt), timeout_s=300)) for receipt in receipts]
    path.write_text(json.dumps(dict(enumerate(outputs))))


def _output(result: JobResult) -> list[dict[str, object]]:
    return [
        {
            "ids": list(choice.token_ids),
            "text": choice.text,
            "finish": choice.finish_reason,
            "vector": None if choice.vector is None else choice.vector.hex(),
        }
        for choice in result.choices
    ]


# ---------------------------------------------------------------- what was promised


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A job that is about to be submitted."""

    asked: str
    """Its id."""

    ask: int
    ends: tuple[str, ...] = ("done",)
    batch: str | None = None
    callback: bool = False


class JournalWriter:
    """A journal with a line before and after each submit: a kill loses at most the last line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def intend(self, intents: Iterable[Intent]) -> None:
        """Record a job before its submit."""
        self._write(asdict(intent) for intent in intents)

    def acknowledge(self, job_ids: Iterable[str]) -> None:
        """Record the acknowledgement of a submit, and when it came, by the monotonic clock that all processes share."""
        at_s = time.monotonic()
        self._write({"acknowledged": job_id, "at_s": at_s} for job_id in job_ids)

    def _write(self, lines: Iterable[Mapping[str, object]]) -> None:
        self._file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._file.flush()
