"""Assemble the Lua scripts: shared libraries, the script itself, and constants from Python."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from sluice.protocol import limits
from sluice.protocol.rows import LETTERS
from sluice.protocol.states import TRANSITIONS, JobState

_BASE, _SHARED = ("lib_base",), ("lib_time", "lib", "lib_lanes", "lib_places", "lib_finish", "lib_ends")
"""Libraries before every script, in this order. A script with `INCLUDE` lines, or that begins with `BASE_ONLY`, gets
only the base."""

BASE_ONLY = "-- base only\n"

_INNER = "local function main()\n{}\nend\nreturn main()\n"
"""What follows the base is a function of its own. Lua finds a local that an inner function uses by walking through all
that are in use; so it walks to those of the base, which most functions use, only once. A function takes 200 at most."""


@dataclass(frozen=True, slots=True)
class Script:
    """An assembled script."""

    name: str
    source: str
    sha1: str


@cache
def load(name: str) -> Script:
    """Assemble a script by its file name without extension; its header is for people."""
    own = _read(name)
    is_lean = own.startswith(BASE_ONLY) or _LATER.search(own) is not None
    first = (*_BASE, *_included(own)) if is_lean else (*_BASE, *_SHARED, *_included(own))
    rest = _joined(first[len(_BASE) :]) + _expanded(_HEADER.sub("", own))
    source = _with_constants(f"{_joined(_BASE)}{_INNER.format(rest)}")
    return Script(name=name, source=source, sha1=register(source))


_sources: dict[str, str] = {}


def register(source: str) -> str:
    """Register a script that is not a file of this folder; return its SHA-1 digest."""
    sha1 = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    _sources[sha1] = source
    return sha1


def source_of(sha1: str) -> str:
    """Return the source of a script that was loaded or registered."""
    return _sources[sha1]


def _joined(names: Iterable[str]) -> str:
    return "".join(f"{_expanded(_read(name))}\n" for name in names)


def _expanded(source: str) -> str:
    """Replace `INCLUDE` lines by the libraries that they name, which may have such lines themselves."""
    return _LATER.sub(lambda match: _joined(match[1].split()), source)


def _read(name: str) -> str:
    return files("sluice.protocol.scripts").joinpath(f"{name}.lua").read_text(encoding="utf-8")


def _included(source: str) -> list[str]:
    """Return the names of libraries that only some scripts need, from a first line `-- include: …`."""
    first = source.partition("\n")[0]
    return first.removeprefix("-- include:").split() if first.startswith("-- include:") else []


def _with_constants(source: str) -> str:
    """Replace `LIMITS.NAME` by the numbers of `limits.py`, and the names of tables of states by these tables.

    As text, so that Lua and Python always agree, and no script computes a table at each call.
    """
    rows = {state: ways_out for state, ways_out in TRANSITIONS.items() if state is not JobState.BLOCKED}
    ways = " ".join(f"{state}>{to}" for state, ways_out in rows.items() for to in sorted(ways_out))
    letters = ", ".join(f"{state} = '{letter}'" for state, letter in LETTERS.items())
    states = ", ".join(f"{letter} = '{state}'" for state, letter in LETTERS.items())
    tables = {
        "TRANSITIONS": f"' {ways} '",
        "LETTERS_OF_STATES": f"{{ {letters} }}",
        "STATES_OF_LETTERS": f"{{ {states} }}",
    }
    source = _LIMIT.sub(lambda match: str(vars(limits)[match[1]]), source)
    return _TABLE.sub(lambda match: tables[match[0]], source)


_HEADER = re.compile(r"\A(?:--.*\n)+")
_LATER = re.compile(r"^INCLUDE (.*)$", re.MULTILINE)
_TABLE = re.compile(r"\b(?:TRANSITIONS|LETTERS_OF_STATES|STATES_OF_LETTERS)\b")
_LIMIT = re.compile(r"\bLIMITS\.([A-Z_]+)")
