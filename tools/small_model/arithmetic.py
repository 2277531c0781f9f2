"""Sums, differences, products and quotients of small numbers; two-digit ones computed by tens and ones."""

from __future__ import annotations

import random
from dataclasses import replace

from tools.small_model.example import NUMBER_ONLY, Example, Kind, Tasks, one_of, some_system
from tools.small_model.words import THINGS, some_name

_WORDINGS = (
    "What is {a} {sign} {b}?",
    "What is {a} {word} {b}?",
    "How much is {a} {word} {b}?",
    "How much is {a} {sign} {b}?",
    "Calculate {a} {sign} {b}.",
    "Compute {a} {sign} {b}.",
    "{a} {sign} {b}",
    "{a} {sign} {b} = ?",
    "{a}{sign}{b}",
    "What is {a}{sign}{b}?",
)
_COMMANDS = {
    "+": "Add {a} and {b}.",
    "-": "Subtract {b} from {a}.",
    "*": "Multiply {a} by {b}.",
    "/": "Divide {a} by {b}.",
}
_BY_HEART = ("multiply", "divide")
_SPOKEN = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def _calculation(rng: random.Random, task: str, terms: tuple[int, str, int], steps: str) -> Example:
    """Ask for `terms` in one of the wordings; `steps` is the text after the first equals sign."""
    a, sign, b = terms
    ordered = sorted((a, b)) if sign in "+*" else [a, b]
    prompt = one_of(rng, (*_WORDINGS, _COMMANDS[sign]), a=a, b=b, sign=sign, word=_SPOKEN[sign])
    example = Example(
        kind=Kind.ARITHMETIC,
        task=task,
        # A table is memorised: an unseen entry cannot be known, so the wording is held out there.
        key=prompt if task in _BY_HEART else f"{ordered[0]}{sign}{ordered[1]}",
        prompt=prompt,
        answer=f"{a} {sign} {b} = {steps}.",
        system=some_system(rng),
    )
    form = rng.random()
    if form < 0.15:
        return replace(example, prompt=f"{a} {sign} {b} =", answer=f" {steps}.", system=None, is_plain=True)
    if form < 0.25 and "=" not in steps:
        return replace(example, answer=steps, system=NUMBER_ONLY)
    return example


def sum_in_steps(a: int, b: int) -> str:
    """Compute `a + b`, by tens and ones if both have both; `b` may be negative.

    A small model learns two tables of ten by ten and how to join them, not ten thousand sums.
    """
    sign = -1 if b < 0 else 1
    (a_tens, a_ones), (b_tens, b_ones) = divmod(a, 10), divmod(abs(b), 10)
    if 0 in (a_tens, a_ones, b_tens, b_ones):
        return str(a + b)
    tens, ones = 10 * (a_tens + sign * b_tens), a_ones + sign * b_ones
    return f"{tens} {'-' if ones < 0 else '+'} {abs(ones)} = {a + b}"


def _add(rng: random.Random) -> Example:
    a, b = rng.randrange(100), rng.randrange(100)
    return _calculation(rng, "add", (a, "+", b), sum_in_steps(a, b))


def _subtract(rng: random.Random) -> Example:
    a, b = rng.randrange(100), rng.randrange(100)
    if a < b and rng.random() < 0.6:
        a, b = b, a
    return _calculation(rng, "subtract", (a, "-", b), sum_in_steps(a, -b))


def _multiply(rng: random.Random) -> Example:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    return _calculation(rng, "multiply", (a, "*", b), str(a * b))


def product_in_steps(a: int, b: int) -> str:
    """Compute `a * b` for a digit `b`: tens and ones separately, then their sum."""
    tens, ones = a - a % 10, a % 10
    return f"{tens} * {b} + {ones} * {b} = {tens * b} + {ones * b} = {a * b}"


def _multiply_by_digit(rng: random.Random) -> Example:
    a, b = rng.randint(13, 99), rng.randint(2, 9)
    return _calculation(rng, "multiply by digit", (a, "*", b), product_in_steps(a, b))


def _divide(rng: random.Random) -> Example:
    b, quotient = rng.randint(1, 12), rng.randint(0, 12)
    return _calculation(rng, "divide", (b * quotient, "/", b), str(quotient))


def worksheet_line(rng: random.Random) -> Example:
    """Draw a calculation in its plain form, `12 + 30 =` and the rest, for documents of many."""
    name = rng.choices(list(_CALCULATIONS), [weight for weight, _ in _CALCULATIONS.values()])[0]
    while True:
        example = _CALCULATIONS[name][1](rng)
        if example.is_plain:
            return example


def _story_problem(rng: random.Random) -> Example:
    name, thing = some_name(rng), rng.choice(THINGS)
    a, b = sorted((rng.randint(1, 99), rng.randint(1, 99)), reverse=True)
    verb, change = rng.choice((("gets {b} more", b), ("finds {b} more", b), ("gives {b} away", -b), ("loses {b}", -b)))
    steps = f"{a} {'+' if change > 0 else '-'} {b} = {sum_in_steps(a, change)}"
    return Example(
        kind=Kind.ARITHMETIC,
        task="story problem",
        key=f"{a} {verb} {b}",
        prompt=f"{name} has {a} {thing} and {verb.format(b=b)}. How many {thing} does {name} have now?",
        answer=f"{steps}. {name} has {a + change} {thing}.",
        system=some_system(rng),
    )


_CALCULATIONS: Tasks = {
    "add": (3, _add),
    "subtract": (3, _subtract),
    "multiply": (1, _multiply),
    "multiply by digit": (1, _multiply_by_digit),
    "divide": (0.7, _divide),
}

TASKS: Tasks = {**_CALCULATIONS, "story problem": (1.5, _story_problem)}
