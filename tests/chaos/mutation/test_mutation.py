"""Every patch still applies, and cheap guards' tests fail without them. `make mutation-test` breaks every guard."""

import ast
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.mutation.guards import GUARDS, Guard, Patch
from tests.chaos.mutation.run import PatchDoesNotApply, apply, break_guard, copy_project, judge, verdict_of

ROOT = Path(__file__).parents[3]


def defined_in(path: Path) -> set[str]:
    """Return the names of a file's classes and functions, or of all files in a folder."""
    files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    assert files, f"no tests in {path}"
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unmodified copy of the project."""
    folder = tmp_path_factory.mktemp("mutation")
    copy_project(folder)
    return folder


class TestGivenEveryGuard:
    @pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
    def test_when_it_is_broken_then_its_patches_fit_the_code(self, base: Path, tmp_path: Path, guard: Guard) -> None:
        files = [path for patch in guard.patches for path in base.glob(patch.files)]
        for path in files:
            copy = tmp_path / path.relative_to(base)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)

        break_guard(guard, tmp_path)

        broken = [path for path in files if (tmp_path / path.relative_to(base)).read_bytes() != path.read_bytes()]
        assert broken

    @pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
    def test_when_its_tests_are_looked_up_then_each_is_there(self, guard: Guard) -> None:
        named = [name.partition("[")[0].split("::") for name in guard.tests]

        assert [names for names in named if not set(names[1:]) <= defined_in(ROOT / names[0])] == []

    def test_when_named_then_no_two_have_the_same_name(self) -> None:
        assert max(Counter(guard.name for guard in GUARDS).values()) == 1


class TestGivenCodeThatHasMoved:
    @pytest.mark.parametrize("text", ["nothing", "twice twice"])
    def test_when_a_patch_does_not_fit_exactly_once_then_it_is_not_applied(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "a.lua"
        file.write_text(text)

        with pytest.raises(PatchDoesNotApply, match="must occur once"):
            apply(Patch("*.lua", "twice", "once"), tmp_path)
        assert file.read_text() == text


class TestGivenTheOutputOfTests:
    """Of a project with a broken guard."""

    @pytest.mark.parametrize(
        ("code", "output", "why"),
        [
            (0, "3 passed", "no test failed"),
            (4, "ERROR: not found: tests/nothing.py", "did not run"),
            (
                1,
                "FAILED tests/worker/connection/test_listeners.py::t\nE  NameError: name 'x'",
                "the patch does not run",
            ),
            (1, "FAILED tests/integration/test_worker_serves.py::t - assert", "breaks more than its guard"),
        ],
    )
    def test_when_it_does_not_show_a_missing_guard_then_it_does_not_count(
        self, code: int, output: str, why: str
    ) -> None:
        is_caught, reason = verdict_of(code, output)

        assert not is_caught
        assert why in reason


@pytest.mark.slow
@pytest.mark.parametrize("guard", [guard for guard in GUARDS if guard.is_cheap], ids=lambda guard: guard.name)
def test_when_a_guard_is_broken_then_its_tests_fail(base: Path, guard: Guard) -> None:
    verdict = judge(guard, base)

    assert verdict.is_caught, verdict.failed
