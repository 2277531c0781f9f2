"""Building blocks of the corpus: a prompt with a correct answer, and a check of other answers.

Knows nothing of tokens: see `documents.py` for how examples become training rows.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

ONE_WORD = "Answer with one word."
NUMBER_ONLY = "Answer with the number only."
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a small model.", "Be short and clear.", "Answer the user.")


class Kind(StrEnum):
    """The kinds whose accuracy is measured, one by one."""

    ARITHMETIC = "arithmetic"
    STORY = "story"
    FACT = "fact"
    LIST = "list"
    JSON = "json"
    TALK = "talk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt and an answer to it."""

    kind: Kind
    task: str
    """Task within the kind, such as `add`."""

    key: str
    """Content of the question, without its wording if that does not matter. Examples are held out by this."""

    prompt: str
    answer: str
    system: str | None = None
    is_plain: bool = False
    """The answer continues the prompt, without chat turns."""

    judge: Callable[[str], bool] | None = None
    """Checks an answer if more than one is correct."""

    def is_right(self, text: str) -> bool:
        """Whether `text`, without special tokens, answers the prompt."""
        if self.judge is not None:
            return self.judge(text)
        return text.strip() == self.answer.strip()


Draw = Callable[[random.Random], Example]
Tasks = dict[str, tuple[float, Draw]]
"""Name of a task -> its weight among the tasks of its kind, and how to draw an example."""


def is_held_out(example: Example) -> bool:
    """Whether the example belongs to the tenth that is never trained on."""
    digest = hashlib.blake2b(f"{example.kind}|{example.task}|{example.key}".encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big") % 10 == 0


def draw_from(tasks: Tasks, rng: random.Random, *, held_out: bool) -> Example:
    """Draw a task by weight, then examples of it until one is on the wanted side of the hold-out."""
    names = list(tasks)
    name = rng.choices(names, [tasks[each][0] for each in names])[0]
    while True:
        example = tasks[name][1](rng)
        if is_held_out(example) == held_out:
            return example


def one_of(rng: random.Random, wordings: Sequence[str], **fields: object) -> str:
    """Choose a wording and fill its fields in."""
    return rng.choice(wordings).format(**fields)


def some_system(rng: random.Random) -> str | None:
    """Choose a system prompt that changes nothing, or none."""
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else None


def with_article(noun: str) -> str:
    """Put `a` or `an` before a noun."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
