"""Signals that come while a worker process still starts: none of them is lost, and none ends it.

SIGUSR1 ends a process that has no handler yet. SIGTSTP does nothing to one that is alone in its session, as a fleet's
are: the kernel drops it there (an orphaned process group). So whoever starts a worker holds both back, and the worker
lets them come once it hears them, which is long before its model is loaded.
"""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

HELD_BACK = frozenset({signal.SIGTSTP, signal.SIGUSR1})
"""SIGCONT need not be: it takes a SIGTSTP back that has not come yet, as the kernel has it."""


class Quiet:
    """Whether a worker was asked to pull no more. Changes with each SIGTSTP and SIGCONT, also before anything pulls."""

    def __init__(self) -> None:
        self.is_asked = False


@contextmanager
def held_back() -> Generator[None]:
    """Processes that this thread starts meanwhile begin with those signals blocked, and they wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_early(quiet: Quiet) -> None:
    """Hear those signals, and those that have waited, until the daemon does. In the main thread, before any other."""

    def hear(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGUSR1:  # there is no sequence yet to tell of
            quiet.is_asked = number == signal.SIGTSTP

    for number in (*HELD_BACK, signal.SIGCONT):
        signal.signal(number, hear)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
