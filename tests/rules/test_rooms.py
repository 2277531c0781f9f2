"""The import rules of pyproject.toml leave no module out that was added after them."""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SEEN_BY_THE_WORKER = {
    *("producer.contract", "producer.embedded", "producer.config", "producer.errors"),
    *("producer.bulk_jobs", "producer.bulk_input", "producer.jobs", "producer.journal"),
}


def contract_named(words: str) -> dict[str, Any]:  # Any: TOML is untyped
    """The import contract whose name has these words."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = [contract for contract in contracts if words in contract["name"]]
    return found


class TestGivenTheContractOnWhatTheWorkerSeesOfTheProducer:
    def test_when_the_producer_s_modules_are_listed_then_each_is_seen_or_forbidden(self) -> None:
        forbidden = set(contract_named("The worker sees of the producer")["forbidden_modules"])
        entries = [path for path in (ROOT / "producer").iterdir() if path.suffix == ".py" or path.name == "contract"]

        modules = {f"producer.{path.stem}" for path in entries if not path.stem.startswith("__")}

        assert modules == forbidden | SEEN_BY_THE_WORKER
        assert forbidden & SEEN_BY_THE_WORKER == set()
