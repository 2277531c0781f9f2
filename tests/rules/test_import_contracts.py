"""The import contracts of pyproject.toml cover every module of the producer."""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SEEN_BY_THE_WORKER = {"sluice.producer.contract"}


def contract_named(words: str) -> dict[str, Any]:  # Any: TOML is untyped
    """The import contract whose name has these words."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = [contract for contract in contracts if words in contract["name"]]
    return found


def _module(path: Path) -> str:
    return "sluice." + ".".join(path.relative_to(ROOT).with_suffix("").parts)


class TestGivenTheContractOnWhatTheWorkerSeesOfTheProducer:
    def test_when_the_producer_s_modules_are_listed_then_each_is_seen_or_forbidden(self) -> None:
        forbidden = set(contract_named("The worker sees of the producer")["forbidden_modules"])
        paths = [path for path in (ROOT / "producer").rglob("*.py") if not path.stem.startswith("__")]
        listed = tuple(f"{name}." for name in forbidden | SEEN_BY_THE_WORKER)

        assert [name for name in map(_module, paths) if not f"{name}.".startswith(listed)] == []
        assert forbidden & SEEN_BY_THE_WORKER == set()


class TestGivenTheTypeChecker:
    def test_when_its_folders_are_listed_then_each_link_of_the_namespace_is_named(self) -> None:
        """Pyright does not follow a link that it meets inside a folder, and says nothing."""
        included = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["include"])

        links = {f"sluice/{path.name}" for path in (ROOT / "sluice").iterdir() if path.is_symlink()}

        assert links
        assert links <= included
