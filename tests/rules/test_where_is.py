"""The tables of mechanisms and of a job's steps: files exist and define their symbols, a step has at most one file."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "architecture.md"
MECHANISMS = ROOT / "docs" / "reference" / "mechanisms.md"
MIN_MECHANISMS = 20
MIN_STEPS = 12
ROW = re.compile(
    r"^\|\s*(?P<mechanism>[^|]+?)\s*\|\s*\[[^\]]+\]\((?P<path>[^)#]+)[^)]*\)\s*\|\s*(?P<symbols>[^|]+?)\s*\|"
)


def section(heading: str) -> str:
    """Return the part of the page from a heading to the next one of its level."""
    found = re.search(rf"^## {heading}.*?(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def steps() -> list[tuple[str, list[str]]]:
    """Return number and files of each step of a job's life; its files are all paths of its row."""
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", section("The life of a job"), re.MULTILINE)
    return [(number, re.findall(r"`([\w./]+/[\w./]+)`", cells)) for number, cells in rows]


def rows() -> list[tuple[str, Path, str]]:
    """Return mechanism, file and symbol of each row; a row with several symbols gives several."""
    found = [match for line in MECHANISMS.read_text().splitlines() if (match := ROW.match(line))]
    return [
        (match["mechanism"], (MECHANISMS.parent / match["path"]).resolve(), symbol)
        for match in found
        for symbol in re.findall(r"`([^`]+)`", match["symbols"])
    ]


def is_defined(symbol: str, path: Path) -> bool:
    """Whether a file defines a symbol: `name` at any depth or `Class.name` in Python, a function in Lua."""
    names = symbol.removesuffix("()").split(".")
    if path.suffix == ".lua":
        return re.search(rf"^(local )?function {re.escape(names[-1])}\(", path.read_text(), re.MULTILINE) is not None
    tree = ast.parse(path.read_text())
    if len(names) == 1:
        return any(isinstance(node, ast.stmt) and names[0] in names_of(node) for node in ast.walk(tree))
    scope = tree.body
    for name in names:
        found = [statement for statement in scope if name in names_of(statement)]
        if not found:
            return False
        scope = [inner for one in found if isinstance(one, ast.ClassDef) for inner in one.body]
    return True


def names_of(statement: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case _:
            return set()


class TestGivenTheTableOfMechanisms:
    def test_when_it_is_read_then_it_has_what_people_look_for(self) -> None:
        assert len({mechanism for mechanism, _, _ in rows()}) >= MIN_MECHANISMS

    @pytest.mark.parametrize(("mechanism", "path", "symbol"), rows(), ids=lambda value: str(value).split("/")[-1])
    def test_when_a_row_is_followed_then_its_file_defines_the_symbol(
        self, mechanism: str, path: Path, symbol: str
    ) -> None:
        assert path.is_file(), f"{mechanism}: no file {path}"
        assert is_defined(symbol, path), f"{mechanism}: {path.name} does not define {symbol}"


class TestGivenTheLifeOfAJob:
    def test_when_it_is_read_then_its_steps_are_numbered_and_their_files_exist(self) -> None:
        numbers = [int(number) for number, _ in steps()]

        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= MIN_STEPS
        assert [path for _, paths in steps() for path in paths if not (ROOT / path).is_file()] == []

    def test_when_a_step_is_looked_up_then_it_names_at_most_one_file(self) -> None:
        assert [step for step in steps() if len(step[1]) > 1] == []


class TestGivenAPythonFile:
    """So that the rule can fail."""

    @pytest.mark.parametrize(
        ("symbol", "is_there"),
        [("rows", True), ("rows()", True), ("ROW", True), ("TestGivenAPythonFile", True), ("is_there", False)],
    )
    def test_when_a_symbol_is_looked_up_then_only_a_definition_counts(self, symbol: str, is_there: bool) -> None:
        assert is_defined(symbol, Path(__file__)) == is_there

    def test_when_a_method_is_looked_up_then_its_class_must_define_it(self) -> None:
        method = "test_when_a_symbol_is_looked_up_then_only_a_definition_counts"

        assert is_defined(f"TestGivenAPythonFile.{method}", Path(__file__))
        assert not is_defined(f"TestGivenTheTableOfMechanisms.{method}", Path(__file__))


class TestGivenAScript:
    """So that the rule can fail."""

    @pytest.mark.parametrize(
        ("line", "is_definition"),
        [
            ("local function take(id)", True),
            ("function take(id)", True),
            ("local one = take(id)", False),
            ("-- function take(id)", False),
            ("local function take_all()", False),
        ],
    )
    def test_when_a_function_is_looked_up_then_a_mention_is_not_enough(
        self, line: str, is_definition: bool, tmp_path: Path
    ) -> None:
        script = tmp_path / "script.lua"
        script.write_text(f"local count = 0\n{line}\n")

        assert is_defined("take", script) == is_definition
