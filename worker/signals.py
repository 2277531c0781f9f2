"""Signals that arrive while a worker process starts. None is lost and none ends the process.

SIGUSR1 ends a process without a handler. The kernel drops SIGTSTP for a process that is alone in its session (an
orphaned process group), as a fleet's processes are. A parent therefore starts workers with both signals blocked, and
the worker unblocks them when its handlers are installed, long before its model is loaded.
"""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

STARTUP_SIGNALS = frozenset({signal.SIGTSTP, signal.SIGUSR1})
"""Signals that are blocked at startup. SIGCONT is not among them: the kernel discards a pending SIGTSTP with it."""


class Quiet:
    """Whether the worker must stop pulling jobs. Changes with each SIGTSTP and SIGCONT."""

    def __init__(self) -> None:
        self._is_asked = False

    @property
    def is_asked(self) -> bool:
        """Whether the worker must stop pulling."""
        return self._is_asked

    def set(self) -> None:
        """Ask the worker to stop pulling."""
        self._is_asked = True

    def clear(self) -> None:
        """Let the worker pull again."""
        self._is_asked = False


@contextmanager
def block_startup_signals() -> Generator[None]:
    """Block the startup signals in processes that this thread starts inside the context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STARTUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def install_startup_handlers(quiet: Quiet) -> None:
    """Handle the startup signals, pending ones included, until the daemon installs its own handlers.

    Call this in the main thread before other threads start.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            quiet.set()
        elif number == signal.SIGCONT:  # at SIGUSR1 there is no sequence to log yet
            quiet.clear()

    for number in (*STARTUP_SIGNALS, signal.SIGCONT):
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STARTUP_SIGNALS)
