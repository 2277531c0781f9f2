"""Signals to a process that has no handlers yet, alone in its session as a fleet's members are."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.worker.signals import STARTUP_SIGNALS, block_startup_signals

ROOT = Path(__file__).parent.parent.parent
CHILD = """
import sys
from sluice.worker.signals import Quiet, install_startup_handlers

quiet = Quiet()
print("loads", flush=True)
sys.stdin.readline()
install_startup_handlers(quiet)
print(quiet.is_asked, flush=True)
sys.stdin.readline()
print(quiet.is_asked, flush=True)
"""
TSTP, CONT, USR1 = signal.SIGTSTP, signal.SIGCONT, signal.SIGUSR1


def printed(before: list[signal.Signals], after: list[signal.Signals]) -> list[str]:
    """What a process prints that was sent signals before it handles them, and after."""
    with block_startup_signals():
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        lines = [child.stdout.readline().strip()]
        for numbers in (before, after):
            for number in numbers:
                child.send_signal(number)
            child.stdin.write("\n")
            child.stdin.flush()
            lines.append(child.stdout.readline().strip())
    assert child.returncode == 0
    return lines


class TestGivenAProcessThatWasStartedWithThemHeldBack:
    @pytest.mark.parametrize(
        ("numbers", "is_quiet"),
        [([TSTP], True), ([TSTP, CONT], False), ([TSTP, CONT, TSTP], True), ([CONT, TSTP], True), ([USR1], False)],
        ids=str,
    )
    def test_when_they_come_before_it_hears_or_after_then_the_last_one_counts(
        self, numbers: list[signal.Signals], is_quiet: bool
    ) -> None:
        assert printed(numbers, []) == ["loads", str(is_quiet), str(is_quiet)]
        assert printed([], numbers) == ["loads", "False", str(is_quiet)]

    def test_when_it_was_quiet_before_and_is_changed_after_then_it_is_not(self) -> None:
        assert printed([TSTP, USR1], [CONT, USR1]) == ["loads", "True", "False"]

    def test_when_it_has_been_started_then_nothing_is_held_back_of_who_started_it(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())

        with block_startup_signals():
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before | STARTUP_SIGNALS

        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
