"""Load the Lua scripts: each is its own file, behind the prelude that all share and the tables that Python owns."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from producer.contract import limits
from producer.contract.states import TRANSITIONS


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
    included = [_read(library) for library in _included(own)]
    source = "\n".join([_limits(), _transitions(), _read("lib"), *included, own])
    return Script(name=name, source=source, sha1=hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    return files("producer.contract.scripts").joinpath(f"{name}.lua").read_text(encoding="utf-8")


def _included(source: str) -> list[str]:
    """Names on a first line `-- include: …`: what only some scripts share."""
    first = source.partition("\n")[0]
    return first.removeprefix("-- include:").split() if first.startswith("-- include:") else []


def _limits() -> str:
    """Every number of `limits.py` under its name there, so that Lua and Python cannot disagree."""
    numbers = {
        name: value for name, value in vars(limits).items() if name.isupper() and isinstance(value, (int, float))
    }
    return "local LIMITS = {" + ", ".join(f"{name} = {value}" for name, value in sorted(numbers.items())) + "}"


def _transitions() -> str:
    """The table of `states.py`: `MAY.queued.running` is true."""
    rows = (
        f"{state} = {{{', '.join(f'{to} = true' for to in sorted(ways_out))}}}"
        for state, ways_out in TRANSITIONS.items()
    )
    return "local MAY = {" + ", ".join(rows) + "}"
