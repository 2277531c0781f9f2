"""Limits on sizes that no linter checks: modules in a folder, lines of a file, length of test names."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("engine", "kernels", "migrations", "producer", "worker")
FOLDERS = (*PACKAGES, "benchmarks", "tests", "tools")
MAX_MODULES = 15
MAX_LINES = 500
"""Lines of a product file; kernels are exempt."""

MAX_TEST_NAME = 80


def modules(*folders: str) -> list[Path]:
    """Every Python file below these folders, without caches."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """The path from the root, as a test's id."""
    return str(path.relative_to(ROOT))


def names_of_tests(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name


class TestGivenEveryFolder:
    def test_when_its_modules_are_counted_then_a_reader_can_survey_them(self) -> None:
        # Migrations grow by one with each change of the schema.
        counted = [path for path in modules(*FOLDERS) if path.name != "__init__.py" and path.parent.name != "versions"]

        found = Counter(name_of(path.parent) for path in counted)

        assert {folder: count for folder, count in found.items() if count > MAX_MODULES} == {}


class TestGivenEveryProductFile:
    def test_when_its_lines_are_counted_then_it_is_within_the_limit(self) -> None:
        limited = [path for path in modules(*PACKAGES) if path.relative_to(ROOT).parts[0] != "kernels"]

        lines = {name_of(path): len(path.read_text().splitlines()) for path in limited}

        assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


class TestGivenEveryTestFile:
    @pytest.mark.parametrize("path", modules("tests"), ids=name_of)
    def test_when_its_names_are_measured_then_each_is_short(self, path: Path) -> None:
        assert [name for name in names_of_tests(path) if len(name) > MAX_TEST_NAME] == []
