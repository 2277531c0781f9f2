"""What the documents say of the code is still so: the loop, the codes of errors, the settings."""

import ast
import re
from pathlib import Path

from engine import errors
from engine.errors import RequestRejected
from producer.bulk_output import CALLERS_CODES
from worker.config import READ_ELSEWHERE, SETTINGS
from worker.translate import code_of

ROOT = Path(__file__).parent.parent.parent
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def loop_of_the_daemon() -> list[str]:
    """The statements of the worker's loop, in order."""
    tree = ast.parse((ROOT / "worker" / "daemon.py").read_text())
    (loop,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_loop"]
    (cycle,) = [node for node in loop.body if isinstance(node, ast.While)]
    return [ast.unparse(statement) for statement in cycle.body]


class TestGivenTheArchitecture:
    def test_when_it_shows_the_loop_then_it_is_the_one_that_runs(self) -> None:
        (shown,) = re.findall(r"while not stopping:\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)

        assert [line.strip() for line in shown.splitlines() if line.strip()] == loop_of_the_daemon()


class TestGivenTheOperationsPage:
    def test_when_the_engine_rejects_a_request_then_its_code_is_in_the_table(self) -> None:
        kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestRejected)]

        codes = {code_of(kind("")) for kind in kinds} | CALLERS_CODES

        assert [code for code in sorted(codes) if f"`{code}`" not in OPERATIONS] == []


class TestGivenEveryDocument:
    def test_when_it_names_a_setting_then_there_is_one(self) -> None:
        known = {leaf.env_name for leaf in SETTINGS} | READ_ELSEWHERE

        named = {name for page in DOCUMENTS for name in re.findall(r"\bSLUICE_[A-Z_]+[A-Z]", page.read_text())}

        assert named - known == set()
