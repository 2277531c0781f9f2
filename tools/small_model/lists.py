"""Lists: counting (up to a thousand, the long deterministic job), alphabets, tables, spelling."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence

from tools.small_model.example import Example, Kind, Tasks, one_of, some_system
from tools.small_model.words import LISTS, NUMBER_WORDS, words

LARGEST_COUNT = 1000

_ORDERED = {
    "days of the week": words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "months of the year": words(
        "January February March April May June July August September October November December"
    ),
    "planets": words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
    "seasons": words("spring summer autumn winter"),
}


def _example(rng: random.Random, task: str, key: str, prompt: str, answer: str) -> Example:
    return Example(kind=Kind.LIST, task=task, key=key, prompt=prompt, answer=answer, system=some_system(rng))


def _in_a_row(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) + "."


def _how_many(rng: random.Random, most: int) -> int:
    """Choose a length of at least 3, small ones more often, each order of magnitude alike."""
    return round(math.exp(rng.uniform(math.log(3), math.log(most))))


def count(rng: random.Random, most: int = LARGEST_COUNT) -> Example:
    """Count up over at most `most` numbers."""
    length = _how_many(rng, most)
    first = rng.choice((0, 1, 1, rng.randint(0, LARGEST_COUNT)))
    first = min(first, LARGEST_COUNT + 1 - length)
    last = min(first + length - 1, LARGEST_COUNT)
    wordings = ("Count from {a} to {b}.", "Count from {a} up to {b}.", "List the numbers from {a} to {b}.")
    return _example(
        rng, "count", f"{first} {last}", one_of(rng, wordings, a=first, b=last), _in_a_row(range(first, last + 1))
    )


def _count_some(rng: random.Random) -> Example:
    return count(rng, most=60)


def _count_down(rng: random.Random) -> Example:
    length = _how_many(rng, 40)
    last = rng.choice((0, 1, 1, rng.randint(0, 300)))
    first = last + length - 1
    prompt = one_of(rng, ("Count down from {a} to {b}.", "Count backwards from {a} to {b}."), a=first, b=last)
    return _example(rng, "count down", f"{first} {last}", prompt, _in_a_row(range(first, last - 1, -1)))


def _count_by(rng: random.Random) -> Example:
    step = rng.choice((2, 5, 10, 100))
    first = rng.choice((0, step))
    last = first + step * rng.randint(2, 20)
    prompt = one_of(
        rng,
        ("Count from {a} to {b} by {step}.", "Count from {a} to {b} in steps of {step}."),
        a=first,
        b=last,
        step=step,
    )
    return _example(rng, "count by", f"{first} {last} {step}", prompt, _in_a_row(range(first, last + 1, step)))


def _name_some(rng: random.Random) -> Example:
    category, length = rng.choice(list(LISTS)), rng.randint(2, 10)
    shown = rng.choice((str(length), NUMBER_WORDS[length]))
    prompt = one_of(rng, ("Name {n} {what}.", "List {n} {what}.", "Give me {n} {what}."), n=shown, what=category)
    answer = "\n".join(f"{place}. {item}" for place, item in enumerate(LISTS[category][:length], 1))
    return _example(rng, "name some", f"{category} {shown}", prompt, answer)


def _alphabet(rng: random.Random) -> Example:
    start, end = sorted(rng.sample(range(26), 2)) if rng.random() < 0.7 else (0, 25)
    letters = string.ascii_lowercase[start : end + 1]
    prompt = f"Say the alphabet from {letters[0]} to {letters[-1]}."
    if len(letters) == 26:
        prompt = one_of(rng, ("Say the alphabet.", "Write the alphabet.", "List the letters of the alphabet.", prompt))
    return _example(rng, "alphabet", prompt, prompt, _in_a_row(letters))


def _ordered(rng: random.Random) -> Example:
    what = rng.choice(list(_ORDERED))
    prompt = one_of(
        rng, ("Name the {what}.", "List the {what}.", "What are the {what}?", "Give me the {what}."), what=what
    )
    return _example(rng, "ordered", prompt, prompt, _in_a_row(_ORDERED[what]))


def _table(rng: random.Random) -> Example:
    factor = rng.randint(1, 20)
    wordings = ("Write the table of {n}.", "Write the multiplication table of {n}.", "Show the times table of {n}.")
    prompt = one_of(rng, wordings, n=factor)
    answer = "\n".join(f"{factor} * {each} = {factor * each}" for each in range(1, 11))
    return _example(rng, "table", prompt, prompt, answer)


def _spell(rng: random.Random) -> Example:
    word = rng.choice([word for words in LISTS.values() for word in words])
    prompt = one_of(rng, ("Spell {word}.", "Spell the word {word}.", "How do you spell {word}?"), word=word)
    return _example(rng, "spell", prompt, prompt, "-".join(word.lower()))


TASKS: Tasks = {
    "count": (4, _count_some),
    "count down": (1.5, _count_down),
    "count by": (1.5, _count_by),
    "name some": (3, _name_some),
    "alphabet": (2, _alphabet),
    "ordered": (0.5, _ordered),
    "table": (0.7, _table),
    "spell": (2.5, _spell),
}
