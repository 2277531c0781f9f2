"""Requests for JSON, whose answers must parse to exactly the described value."""

from __future__ import annotations

import json
import random

from tools.small_model.example import Example, Kind, Tasks, one_of, some_system, with_article
from tools.small_model.words import CITIES, LISTS, some_name, some_names

_ASK = ("Write JSON for {what}.", "Give me JSON for {what}.", "Write a JSON object for {what}.", "JSON for {what}.")


def _example(rng: random.Random, task: str, what: str, value: object, wordings: tuple[str, ...] = _ASK) -> Example:
    return Example(
        kind=Kind.JSON,
        task=task,
        key=what,
        prompt=one_of(rng, wordings, what=what),
        answer=json.dumps(value),
        system=some_system(rng),
        judge=lambda text: _parsed(text) == value,
    )


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _person(rng: random.Random) -> Example:
    name, age = some_name(rng), rng.randint(1, 99)
    return _example(rng, "person", f"a person named {name} who is {age}", {"name": name, "age": age})


def _resident(rng: random.Random) -> Example:
    name, age, city = some_name(rng), rng.randint(1, 99), rng.choice(CITIES)
    what = f"a person named {name} who is {age} and lives in {city}"
    return _example(rng, "resident", what, {"name": name, "age": age, "city": city})


def _pet(rng: random.Random) -> Example:
    name, animal, age = some_name(rng), rng.choice(LISTS["animals"]), rng.randint(1, 20)
    what = f"{with_article(animal)} named {name} who is {age}"
    return _example(rng, "pet", what, {"name": name, "animal": animal, "age": age})


def _people(rng: random.Random) -> Example:
    names = some_names(rng, rng.randint(2, 3))
    people = [{"name": name, "age": rng.randint(1, 99)} for name in names]
    what = " and ".join(f"{each['name']} who is {each['age']}" for each in people)
    return _example(rng, "people", what, people, ("Write a JSON list for {what}.", "Give me a JSON list for {what}."))


def _point(rng: random.Random) -> Example:
    x, y = rng.randrange(100), rng.randrange(100)
    return _example(rng, "point", f"a point with x {x} and y {y}", {"x": x, "y": y})


def _numbers(rng: random.Random) -> Example:
    numbers = [rng.randrange(100) for _ in range(rng.randint(2, 5))]
    what = ", ".join(map(str, numbers))
    return _example(
        rng, "numbers", what, numbers, ("Write a JSON list of {what}.", "Give me a JSON list of the numbers {what}.")
    )


def _words(rng: random.Random) -> Example:
    words = rng.sample(LISTS[rng.choice(list(LISTS))], rng.randint(2, 4))
    what = ", ".join(words)
    return _example(
        rng, "words", what, words, ("Write a JSON list of {what}.", "Give me a JSON list of the words {what}.")
    )


def _product(rng: random.Random) -> Example:
    product, price, in_stock = rng.choice(LISTS["tools"] + LISTS["fruits"]), rng.randint(1, 99), rng.random() < 0.5
    what = f"{with_article(product)} that costs {price} and is {'in stock' if in_stock else 'sold out'}"
    return _example(rng, "product", what, {"product": product, "price": price, "in_stock": in_stock})


TASKS: Tasks = {
    "person": (1.5, _person),
    "resident": (1.5, _resident),
    "pet": (1, _pet),
    "people": (3, _people),
    "point": (0.5, _point),
    "numbers": (2, _numbers),
    "words": (3, _words),
    "product": (0.7, _product),
}
