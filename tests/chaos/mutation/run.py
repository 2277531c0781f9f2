"""Mutation tests: break each guard of the protocol in turn, in a copy of the project, and check that its tests fail.

    python -m tests.chaos.mutation.run             every guard, and a table
    python -m tests.chaos.mutation.run fence epoch guards whose name contains one of these words

A mutation is caught if one of the guard's tests failed, the smoke test (jobs of all kinds, no faults) passed, and the
failure is no error of the patch. All these tests must pass in an unmodified copy first. Tests that are parametrized
over servers run on Valkey and SQLite only; property tests run all their examples.

Each run is a fork of a process that has imported all third-party packages, since importing them takes longer than most
of the tests.
Exit codes: 0 all mutations caught; 1 one was missed, or the unmodified copy fails.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from tests.chaos.mutation.guards import GUARDS, Guard, Patch

ROOT = Path(__file__).parents[3]
COPIED = (
    "engine",
    "gateway",
    "history",
    "kernels",
    "migrations",
    "producer",
    "protocol",
    "worker",
    "docs",
    "tests",
    "tools",
    "pyproject.toml",
)
SMOKE = (
    "tests/integration/test_worker_serves.py::TestGivenAWorkerOnAnEmptyQueue"
    "::test_when_jobs_of_all_kinds_come_then_each_token_is_published_once"
)
"""Must pass under every mutation, so that a mutation breaks its guard and nothing else."""

OTHER_SERVERS = ("redis-7.0", "redis-6.2", "postgres")
FROM_OUTSIDE = ("msgpack", "numpy", "pytest", "redis", "sqlalchemy", "structlog", "torch", "transformers")
RUN_TIMEOUT_S = 900
TIMED_OUT = 124
MISTAKES = ("SyntaxError", "IndentationError", "NameError", "ImportError", "nonexistent global", "user_script:")
"""Words in the output that show that a patch does not run, of Python and of Lua."""

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class PatchDoesNotApply(Exception):
    """The text to replace does not occur exactly once: update the row in guards.py."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one mutation."""

    guard: Guard
    failed: str
    """The test that failed, or why the mutation does not count as caught."""

    is_caught: bool
    took_s: float


def copy_project(target: Path) -> None:
    """Copy what the tests need; link the weights of the small model."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", "small_model"))
        else:
            shutil.copy(source, target / name)
    # Its links are relative.
    shutil.copytree(ROOT / "sluice", target / "sluice", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "worker/small_model").symlink_to(ROOT / "worker/small_model")
    shutil.copytree(ROOT / "tools/small_model", target / "tools/small_model")


def apply(patch: Patch, root: Path) -> None:
    """Apply a patch to the project at `root`.

    Raises:
        PatchDoesNotApply: its text does not occur exactly once.
    """
    places = [(path, path.read_text().count(patch.old)) for path in sorted(root.glob(patch.files))]
    found = [path for path, count in places if count]
    if sum(count for _, count in places) != 1:
        where = ", ".join(f"{path.name}: {count}" for path, count in places if count) or "nowhere"
        raise PatchDoesNotApply(f"{patch.files}: must occur once, found {where}: {patch.old!r}")
    found[0].write_text(found[0].read_text().replace(patch.old, patch.new))


def break_guard(guard: Guard, root: Path) -> None:
    """Apply all patches of a guard.

    Raises:
        PatchDoesNotApply: one of them does not apply.
    """
    for patch in guard.patches:
        apply(patch, root)


def run_tests(root: Path, tests: Iterable[str], *, at_a_time: int = 0) -> tuple[int, str]:
    """Run tests in the project at `root` until one fails: exit code and output."""
    arguments = [
        "-x",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "--hypothesis-seed=0",
        "--hypothesis-profile=long",
    ]
    arguments += ["-k", " and ".join(f"not {one}" for one in OTHER_SERVERS), "--timeout=120"]
    arguments += [f"--numprocesses={at_a_time}", *tests]
    with tempfile.NamedTemporaryFile(prefix="mutation-", suffix=".log") as log:
        process = _context().Process(target=_run_pytest, args=(root, arguments, log.name))
        process.start()
        process.join(RUN_TIMEOUT_S)
        if process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            return TIMED_OUT, f"not over after {RUN_TIMEOUT_S} s"
        return process.exitcode, Path(log.name).read_text()


def _context() -> ForkServerContext | SpawnContext:
    """Return that of `main`; in pytest, whose fork server has this project's modules, that of new interpreters."""
    if multiprocessing.get_start_method(allow_none=True) == "forkserver":
        return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("spawn")


def _run_pytest(root: Path, arguments: list[str], log: str) -> None:
    """Run pytest in the project at `root`, in a fork without this project's modules."""
    os.setpgid(0, 0)
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(root)
    os.environ |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for name in [name for name in sys.modules if name.partition(".")[0] in ("sluice", "tests", "tools")]:
        del sys.modules[name]
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT)))]
    import pytest

    # Asserts of modules that were imported before cannot be rewritten.
    sys.exit(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))


def judge(guard: Guard, base: Path) -> Verdict:
    """Break one guard in a copy of the project at `base` and run its tests."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder) / "project"
        shutil.copytree(base, root, symlinks=True)
        try:
            break_guard(guard, root)
        except PatchDoesNotApply as error:
            return Verdict(guard, str(error), is_caught=False, took_s=0.0)
        code, output = run_tests(root, (SMOKE, *guard.tests))
    is_caught, failed = verdict_of(code, output)
    return Verdict(guard, failed, is_caught, time.monotonic() - began_s)


def verdict_of(code: int, output: str) -> tuple[bool, str]:
    """Return whether the mutation was caught, and the failed test or why it does not count."""
    if code == 0:
        return False, "no test failed"
    failed = _FAILED.search(output)
    if code != 1 or failed is None:
        return False, f"the tests did not run (exit {code}): {output.strip().splitlines()[-1:]}"
    mistake = next((word for word in MISTAKES if word in output), None)
    if mistake is not None:
        return False, f"the patch does not run ({mistake}): {failed[1]}"
    if failed[1].startswith(SMOKE.partition("::")[0]):
        return False, "the smoke test failed: the patch breaks more than its guard"
    return True, failed[1]


def check_unmodified(base: Path, guards: Sequence[Guard], *, at_a_time: int) -> str | None:
    """Run the tests of all guards in the unmodified copy; return the output if one failed."""
    tests = dict.fromkeys([SMOKE, *(test for guard in guards for test in guard.tests)])
    code, output = run_tests(base, tests, at_a_time=at_a_time)
    return None if code == 0 else output


def row_of(name: str, caught: str, took: str, test: str) -> str:
    """Return one row of the table."""
    width = max(len(guard.name) for guard in GUARDS)
    return f"{name:{width}}  {caught:6}  {took:>5}  {test}\n"


def judge_all(guards: Sequence[Guard], base: Path, *, at_a_time: int) -> list[Verdict]:
    """Judge the guards, and print a row for each."""
    verdicts: list[Verdict] = []
    sys.stdout.write(row_of("guard", "caught", "s", "the test that failed"))
    with ThreadPoolExecutor(at_a_time) as pool:
        for one in pool.map(partial(judge, base=base), guards):
            word = "yes" if one.is_caught else "NO"
            sys.stdout.write(row_of(one.guard.name, word, f"{one.took_s:.1f}", one.failed))
            sys.stdout.flush()
            verdicts.append(one)
    sys.stdout.write(f"{sum(one.is_caught for one in verdicts)}/{len(verdicts)}\n")
    return verdicts


def main() -> int:
    """Judge the guards that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only guards whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="guards at a time (default: 2)")
    asked = parser.parse_args()
    guards = [one for one in GUARDS if not asked.words or any(word in one.name for word in asked.words)]
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(list(FROM_OUTSIDE))
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        base = Path(folder)
        copy_project(base)
        if (wrong := check_unmodified(base, guards, at_a_time=asked.jobs)) is not None:
            sys.stdout.write(f"{wrong}\na test fails in the unmodified copy\n")
            return 1
        verdicts = judge_all(guards, base, at_a_time=asked.jobs)
    return 0 if all(one.is_caught for one in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
