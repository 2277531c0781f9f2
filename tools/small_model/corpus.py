"""The corpus: an endless, seeded stream of examples, balanced between the kinds.

The same seed gives the same examples on every machine. A tenth of all questions is held out by content (`is_held_out`):
training never sees it, and tests ask nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from tools.small_model import arithmetic, facts, json_answers, lists, stories, talk
from tools.small_model.example import Example, Kind, Tasks, draw_from

TASKS: dict[Kind, Tasks] = {
    Kind.ARITHMETIC: arithmetic.TASKS,
    Kind.STORY: stories.TASKS,
    Kind.FACT: facts.TASKS,
    Kind.LIST: lists.TASKS,
    Kind.JSON: json_answers.TASKS,
    Kind.TALK: talk.TASKS,
}


def examples(kind: Kind, *, seed: int, held_out: bool) -> Iterator[Example]:
    """Yield examples of one kind without end: training ones, sometimes worded carelessly, or held-out ones."""
    rng = random.Random(f"{kind}|{seed}|{held_out}")
    while True:
        example = draw_from(TASKS[kind], rng, held_out=held_out)
        yield example if held_out else as_typed(rng, example)


def as_typed(rng: random.Random, example: Example) -> Example:
    """Return the example as a person may type it: sometimes without capital or final mark, or with a please."""
    prompt = example.prompt
    if example.is_plain or example.kind is Kind.TALK:
        return example
    if rng.random() < 0.12:
        prompt = prompt[0].lower() + prompt[1:]
    if rng.random() < 0.15:
        prompt = prompt.rstrip(".?")
    elif rng.random() < 0.05:
        prompt = "Please " + prompt[0].lower() + prompt[1:]
    return replace(example, prompt=prompt)
