"""Load the Lua scripts: each is its own file, behind the prelude that all share and the tables that Python owns."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from producer.contract import limits
from producer.contract.states import TRANSITIONS

_BASE, _SHARED = ("lib_base",), ("lib", "lib_lanes", "lib_places", "lib_ends")
"""What scripts begin with, in this order; one that puts the shared part elsewhere (`INCLUDE`) begins with the base."""


@dataclass(frozen=True, slots=True)
class Script:
    """One script as the server gets it."""

    name: str
    source: str
    sha1: str


@cache
def load(name: str) -> Script:
    """Read a script by its file name without ending."""
    own = _read(name)
    first = (*_BASE, *_included(own)) if _LATER.search(own) else (*_BASE, *_SHARED, *_included(own))
    source = _with_constants(_joined(first) + _LATER.sub(lambda match: _joined(match[1].split()), own))
    return Script(name=name, source=source, sha1=hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def _joined(names: Iterable[str]) -> str:
    return "".join(f"{_read(name)}\n" for name in names)


def _read(name: str) -> str:
    return files("producer.contract.scripts").joinpath(f"{name}.lua").read_text(encoding="utf-8")


def _included(source: str) -> list[str]:
    """Names on a first line `-- include: …`: what only some scripts share."""
    first = source.partition("\n")[0]
    return first.removeprefix("-- include:").split() if first.startswith("-- include:") else []


def _with_constants(source: str) -> str:
    """Put in the numbers of `limits.py` for `LIMITS.NAME`, and the table of `states.py` for `TRANSITIONS`.

    As text, so that Lua and Python cannot disagree and a script builds no table for them at each call.
    """
    ways = " ".join(f"{state}>{to}" for state, ways_out in TRANSITIONS.items() for to in sorted(ways_out))
    return _LIMIT.sub(lambda match: str(vars(limits)[match[1]]), source).replace("TRANSITIONS", f"' {ways} '")


_LATER = re.compile(r"^INCLUDE (.*)$", re.MULTILINE)
_LIMIT = re.compile(r"\bLIMITS\.([A-Z_]+)")
