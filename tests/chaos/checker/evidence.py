"""The checker's input: the producers' journals, and the output of a reference run without faults.

A journal is lines of JSON. Before a submit, one line for each job: `{"asked": <id>, "ask": <which>, "ends": [states it
may end in], "batch": …, "callback": true}`; after it, for each job that was accepted, `{"acknowledged": <id>}`. A job
that was asked for and not acknowledged may be unknown to the queue; if it is known, it must be right.

A reference is one JSON object: ask -> for each choice `{"ids": […], "text": …, "finish": …, "vector": …}`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True, eq=False)
class Asked:
    """One job as its producer asked for it."""

    id: str
    ask: str
    ends: frozenset[str]
    batch: str | None = None
    wants_callback: bool = False
    is_acknowledged: bool = False


@dataclass(frozen=True, slots=True)
class Expected:
    """The output of one choice in the reference run."""

    ids: tuple[int, ...]
    text: str
    finish: str
    vector: str | None = None
    """In hexadecimal digits."""


Journal = dict[str, Asked]
Reference = dict[str, tuple[Expected, ...]]


def read_journals(paths: Iterable[Path]) -> Journal:
    """All jobs by id. A last line that was cut off by a kill is left out."""
    journal: Journal = {}
    for path in paths:
        for line in path.read_text().split("\n")[:-1]:
            _read_line(journal, json.loads(line))
    return journal


def _read_line(journal: Journal, line: dict[str, Any]) -> None:
    if "acknowledged" in line:
        journal[line["acknowledged"]].is_acknowledged = True
        return
    journal[line["asked"]] = Asked(
        line["asked"], str(line["ask"]), frozenset(line["ends"]), line.get("batch"), bool(line.get("callback"))
    )


def read_reference(path: Path) -> Reference:
    """Read the output of each request, by choice."""
    return {
        ask: tuple(
            Expected(tuple(choice["ids"]), choice["text"], choice["finish"], choice.get("vector")) for choice in choices
        )
        for ask, choices in json.loads(path.read_text()).items()
    }
