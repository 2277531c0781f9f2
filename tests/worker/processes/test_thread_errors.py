"""An error that ends a thread of a long-running process ends the process, with code 1 and a traceback in its log.

Each process gets a thread that fails once the process watches its threads, by a `sitecustomize` of its own.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sluice.worker.errors import ExitCode
from tests.end_to_end.processes import ROOT
from tests.servers import RedisServer

PATIENCE_S = 60.0
FAILING_THREAD = """
import os, sys, threading, time

def fail():
    while threading.excepthook is before:
        time.sleep(0.01)
    raise RuntimeError("injected")

before = threading.excepthook
if os.environ["FAIL_IN"] in " ".join(sys.orig_argv):
    threading.Thread(target=fail, name="injected-thread", daemon=True).start()
"""


@dataclass(frozen=True)
class Failing:
    """Runs commands in which a thread fails."""

    folder: Path
    environ: dict[str, str]

    def run(self, *command: str, fail_in: str = "") -> tuple[int, str]:
        """Run a command until it ends; return its exit code and its log. `fail_in`: part of its own, or a child's."""
        environ = self.environ | {"FAIL_IN": fail_in or " ".join(command)}
        run = [sys.executable, "-P", "-m", *command]
        with (self.folder / "log").open("wb") as log:
            ended = subprocess.run(run, cwd=ROOT, env=environ, stdout=log, stderr=log, timeout=PATIENCE_S, check=False)
        return ended.returncode, (self.folder / "log").read_text()


@pytest.fixture
def failing(valkey: RedisServer, sqlite_url: str, tmp_path: Path) -> Failing:
    """A queue on Valkey with a SQLite history."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FAILING_THREAD)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    environ |= {
        "PYTHONPATH": str(tmp_path / "site"), "SLUICE_REDIS_URL": valkey.url, "SLUICE_DATABASE_URL": sqlite_url,
        "SLUICE_STATE_DIR": str(tmp_path),
    }  # fmt: skip
    return Failing(tmp_path, environ)


WORKER = ("sluice.worker", "start", "--model", "null", "--no-metrics")


@pytest.mark.slow
class TestGivenAThreadThatFails:
    @pytest.mark.parametrize(
        "command",
        [
            ("sluice.worker", "record"),
            ("sluice.worker", "callbacks"),
            ("sluice.producer", "serve", "--port", "0"),
            pytest.param(WORKER, marks=pytest.mark.long),
            pytest.param(("sluice.worker", "fleet", "--scale-to-backlog", *WORKER[2:]), marks=pytest.mark.long),
        ],
        ids=" ".join,
    )
    def test_when_it_has_then_the_process_has_ended_with_1_and_its_traceback(
        self, failing: Failing, command: tuple[str, ...]
    ) -> None:
        code, log = failing.run(*command)

        assert code == ExitCode.BROKEN
        assert_has_traceback(log)

    @pytest.mark.parametrize("child", ["sluice.worker start --until-eof", "sluice.worker.engine_process"])
    @pytest.mark.long
    def test_when_it_is_a_child_of_a_worker_then_the_command_ends_with_1(self, failing: Failing, child: str) -> None:
        code, log = failing.run(*WORKER, "--engine-process", "on", "--no-recorder", fail_in=child)

        assert code == ExitCode.BROKEN
        assert_has_traceback(log)


def assert_has_traceback(log: str) -> None:
    """Check that a log has the error of the thread."""
    assert "Traceback" in log
    assert "RuntimeError: injected" in log
    assert "injected-thread" in log
