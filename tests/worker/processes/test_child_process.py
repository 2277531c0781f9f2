"""A child process comes back whenever it ends, as soon as the system lets it."""

import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sluice.worker.log import get_log
from sluice.worker.processes import child_process as module
from sluice.worker.processes.child_process import ChildProcess, ChildSpec
from sluice.worker.stopping import FINISH_S, FLUSH_S

WAITS = """#!/bin/sh
echo waits >> "$BEGUN"
exec cat
"""
LINGERS = """#!/bin/sh
echo waits >> "$BEGUN"
cat
sleep "$LONGEST_S"
exit 7
"""
CODE_OF_LINGERS = 7
IS_READY = """#!/bin/sh
printf + >&0
exit 3
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
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.02)
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.fixture
def recorder(child: Child) -> Generator[ChildProcess]:
    spec = ChildSpec(kind="recorder", command=(str(child.path),), environ=child.environ, restart="always")
    made = ChildProcess(spec, get_log())
    yield made
    made.stop()


def run_until(recorder: ChildProcess, holds: Callable[[], bool]) -> None:
    """Do what the parent does."""

    def turn() -> bool:
        recorder.start_if_due()
        recorder.look(is_stopping=False)
        return holds()

    wait_until(turn)


class TestGivenAChildThatIsAlwaysRestarted:
    def test_when_it_ends_by_itself_then_it_is_started_again(self, child: Child, recorder: ChildProcess) -> None:
        child.becomes(ENDS)

        run_until(recorder, lambda: child.num_starts() >= 3)

    def test_when_the_system_refuses_to_start_it_then_it_is_started_once_it_may_be(
        self, child: Child, recorder: ChildProcess
    ) -> None:
        child.becomes(ENDS)
        run_until(recorder, lambda: child.num_starts() == 1)
        with capture_logs() as lines:
            # Not removed: a shell that has just begun would not find its script, and end as one who was misused.
            child.path.chmod(0o644)
            run_until(
                recorder,
                lambda: any(line["event"] == "recorder process cannot be started; retrying" for line in lines),
            )
            child.becomes(WAITS)

            run_until(recorder, child.waits)

    def test_when_it_ran_for_long_then_the_next_delay_is_the_first_again(
        self, child: Child, recorder: ChildProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        child.becomes(ENDS)
        with capture_logs() as lines:
            run_until(recorder, lambda: child.num_starts() >= 4)
            monkeypatch.setattr(module, "STEADY_S", 0.0)
            before = len(lines)
            run_until(recorder, lambda: "retry_in_s" in str(lines[before:]))

        delays = [line["retry_in_s"] for line in lines if "retry_in_s" in line]
        assert delays[:3] == [0.02, 0.04, 0.08]
        assert delays[-1] == 0.02

    def test_when_it_is_stopped_while_a_restart_is_due_then_none_is_started(
        self, child: Child, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "FIRST_DELAY_S", 30.0)
        spec = ChildSpec(kind="recorder", command=(str(child.path),), environ=child.environ, restart="always")
        made = ChildProcess(spec, get_log())
        child.becomes(ENDS)
        run_until(made, lambda: made.pid is None and child.num_starts() == 1)

        made.stop()

        assert not made.is_needed
        assert child.num_starts() == 1

    def test_when_it_waits_for_its_input_then_stop_ends_it(self, child: Child, recorder: ChildProcess) -> None:
        child.becomes(WAITS)
        run_until(recorder, child.waits)

        recorder.stop()

        assert recorder.pid is None

    def test_when_it_uses_all_its_time_to_stop_then_it_is_not_killed(
        self, child: Child, recorder: ChildProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scale = 5
        monkeypatch.setattr(module, "STOP_TIMEOUT_S", module.STOP_TIMEOUT_S / scale)
        child.environ["LONGEST_S"] = str((FINISH_S + FLUSH_S) / scale)
        child.becomes(LINGERS)
        run_until(recorder, child.waits)

        recorder.stop()

        assert recorder.last_code == CODE_OF_LINGERS

    def test_when_it_uses_more_than_that_then_it_is_killed(
        self, child: Child, recorder: ChildProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "STOP_TIMEOUT_S", 0.05)
        child.environ["LONGEST_S"] = "60"
        child.becomes(LINGERS)
        run_until(recorder, child.waits)

        recorder.stop()

        assert recorder.last_code == -signal.SIGKILL


class TestGivenAWorkerThatIsRestarted:
    def test_when_each_process_ends_then_it_is_told_whether_that_one_was_ready(self, child: Child) -> None:
        told: list[tuple[str, bool]] = []
        spec = ChildSpec(kind="worker", command=(str(child.path),), environ=child.environ, restart="always")
        worker = ChildProcess(spec, get_log(), lambda incarnation, was_ready: told.append((incarnation, was_ready)))
        child.becomes(IS_READY)
        run_until(worker, lambda: len(told) == 1)
        child.becomes(ENDS)

        run_until(worker, lambda: len(told) == 2)

        worker.stop()
        assert [was_ready for _, was_ready in told] == [True, False]
        assert len(dict(told)) == 2
        assert worker.is_ready
