"""What the soak asks for, what its producers write down, and what an undisturbed run says to the same.

A catalogue is drawn from a seed: a few hundred different asks. Jobs are drawn from the catalogue, so an undisturbed run
of the catalogue alone tells what every job must say. `checker/evidence.py` reads what is written here.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from producer.client import Producer
from producer.contract.wire import JobResult
from producer.jobs import Job, Options

WORDS = ("river", "lamp", "seven", "write", "a story", "of", "the", "small", "cat", "und", "größer", "then", "what")
STOPS = ("e", "th", "qu", "\n\n")


@dataclass(frozen=True, slots=True)
class Ask:
    """One ask of the catalogue."""

    prompt: str
    options: Options

    def job(self, **own: Unpack[Options]) -> Job:
        """A job that asks for this, with options of its own that do not change what it says."""
        return Job(self.prompt, {**self.options, **own})


def catalogue(seed: int, size: int, *, max_tokens: int = 60, temperatures: Sequence[float] = (0.0, 1.0)) -> list[Ask]:
    """Asks that differ in prompt, seed, length, choices, stops and penalties."""
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
    return Ask(" ".join(dice.choices(WORDS, k=dice.randrange(1, 30))), options)


# ---------------------------------------------------------------- undisturbed


def write_reference(producer: Producer, asks: Sequence[Ask], path: Path) -> None:
    """Run the catalogue once, and keep what it said. Nobody may be disturbing."""
    receipts = list(producer.submit_many(ask.job() for ask in asks))
    said = [_said(producer.result(str(receipt), timeout_s=300)) for receipt in receipts]
    path.write_text(json.dumps(dict(enumerate(said))))


def _said(result: JobResult) -> list[dict[str, object]]:
    return [
        {"ids": list(choice.token_ids), "text": choice.text, "finish": choice.finish_reason}
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
    """Written before and after each submit, line by line: a kill costs at most the last line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def intend(self, intents: Iterable[Intent]) -> None:
        """Before the submit."""
        self._write(asdict(intent) for intent in intents)

    def acknowledge(self, job_ids: Iterable[str]) -> None:
        """After it."""
        self._write({"acknowledged": job_id} for job_id in job_ids)

    def _write(self, lines: Iterable[Mapping[str, object]]) -> None:
        self._file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._file.flush()
