"""A worker's child process comes back whenever it ends, as soon as the system lets it."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sluice.worker.log import get_log
from sluice.worker.processes import child_process as module
from sluice.worker.processes.child_process import ChildProcess

WAITS = """#!/bin/sh
echo waits >> "$BEGUN"
exec cat
"""
ENDS = """#!/bin/sh
echo begun >> "$BEGUN"
exit 3
"""


class Child:
    """A program in the interpreter's place, and how often it was started."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "child"
        self._begun = folder / "begun"
        self.environ = {"BEGUN": str(self._begun)}

    def becomes(self, script: str) -> None:
        """Let the next start run `script`."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(script)
        fresh.chmod(0o755)
        fresh.rename(self.path)

    def num_starts(self) -> int:
        return len(self._lines())

    def waits(self) -> bool:
        """Whether the program that reads its input was started."""
        return "waits" in self._lines()

    def _lines(self) -> list[str]:
        return self._begun.read_text().splitlines() if self._begun.exists() else []


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    found = Child(tmp_path)
    monkeypatch.setattr(sys, "executable", str(found.path))
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.02)
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class TestGivenAChildProcess:
    def test_when_it_ends_by_itself_then_it_is_started_again(self, child: Child) -> None:
        child.becomes(ENDS)
        child_process = ChildProcess("recorder", [], child.environ, get_log())
        child_process.start()

        wait_until(lambda: child.num_starts() >= 3)
        child_process.stop()

        assert "recorder" not in [thread.name for thread in threading.enumerate()], "somebody could start it again"

    def test_when_the_system_refuses_to_start_it_again_then_it_is_started_once_it_may_be(self, child: Child) -> None:
        child.becomes(ENDS)
        with capture_logs() as lines:
            child_process = ChildProcess("recorder", [], child.environ, get_log())
            child_process.start()
            # Not removed: a shell that has just begun would not find its script, and end as one who was misused.
            child.path.chmod(0o644)
            wait_until(lambda: any(line["event"] == "recorder cannot be started" for line in lines))
            child.becomes(WAITS)
            wait_until(child.waits)
            child_process.stop()

        assert not any(line["event"] == "recorder did not stop in time" for line in lines)

    def test_when_it_is_stopped_while_it_is_to_be_started_again_then_none_is_left(
        self, child: Child, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "FIRST_DELAY_S", 30.0)
        child.becomes(ENDS)
        child_process = ChildProcess("recorder", [], child.environ, get_log())
        child_process.start()
        wait_until(lambda: child.num_starts() == 1)

        began_s = time.monotonic()
        child_process.stop()

        assert time.monotonic() - began_s < 5
        assert child.num_starts() == 1
