"""constraints.txt is the lock: it names the version of everything that ours needs."""

import re
from importlib.metadata import distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

LOCK = Path(__file__).parent.parent.parent / "constraints.txt"
TOOLS = {"pip", "setuptools", "wheel", "sluice-llm"}
"""What makes the environment, and ourselves."""


def locked() -> dict[str, str]:
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [re.fullmatch(r"([A-Za-z0-9_.-]+)==([A-Za-z0-9_.!+-]+)", line) for line in lines]
    assert all(pairs), "each line is NAME==VERSION"
    return {str(canonicalize_name(pair[1])): pair[2] for pair in pairs if pair}


def needed(name: str, extras: set[str]) -> set[str]:
    """What this distribution and all that it needs are called, on this machine."""
    found: set[str] = set()
    waiting = [(name, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        for line in distribution(one[0]).requires or []:
            requirement = Requirement(line)
            wanted = [{"extra": extra} for extra in (*one[1], "")]
            if requirement.marker is None or any(requirement.marker.evaluate(extra) for extra in wanted):
                found.add(str(canonicalize_name(requirement.name)))
                waiting.append((requirement.name, frozenset(requirement.extras)))
    return found


def test_everything_that_is_installed_is_locked_at_its_version() -> None:
    ours = needed("sluice-llm", {"worker", "embedded", "dev"})
    installed = {str(canonicalize_name(one.name)): one.version for one in distributions()}
    lock = locked()

    # A local part (`+cpu`) is the index's choice.
    wrong = {
        name: (installed[name], lock.get(name))
        for name in ours - TOOLS
        if name in installed and (name not in lock or Version(installed[name]).public != Version(lock[name]).public)
    }
    assert wrong == {}


def test_every_direct_dependency_is_locked() -> None:
    direct = {str(canonicalize_name(Requirement(line).name)) for line in distribution("sluice-llm").requires or []}

    assert direct - set(locked()) == set()
