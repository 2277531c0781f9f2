"""Load the Lua scripts: each is its own file, behind the prelude that all share and the tables that Python owns."""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from producer.contract import limits
from producer.contract.states import TRANSITIONS

_SHARED = ("lib", "lib_lanes", "lib_places", "lib_ends")
"""What every script begins with, in this order."""


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
    libraries = [_read(library) for library in (*_SHARED, *_included(own))]
    source = _with_constants("\n".join([*libraries, own]))
    return Script(name=name, source=source, sha1=hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


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


_LIMIT = re.compile(r"\bLIMITS\.([A-Z_]+)")
