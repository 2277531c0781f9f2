"""Signals: handlers for a while, Ctrl-C held back, and those that arrive while a worker process starts.

At a start none is lost and none ends the process.

SIGUSR1 ends a process without a handler. The kernel drops SIGTSTP for a process that is alone in its session (an
orphaned process group), as a fleet's processes are. A parent therefore starts workers with both signals blocked, and
the worker unblocks them when its handlers are installed, long before its model is loaded.
"""

import ctypes
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import current_thread, main_thread
from types import FrameType

_PR_SET_PDEATHSIG = 1

Handler = Callable[[int, FrameType | None], object]

STARTUP_SIGNALS = frozenset({signal.SIGTSTP, signal.SIGUSR1})
"""Signals that are blocked at startup. SIGCONT is not among them: the kernel discards a pending SIGTSTP with it."""


@dataclass(slots=True, eq=False)
class Quiet:
    """Whether the worker must stop pulling jobs. Changes with each SIGTSTP and SIGCONT."""

    is_asked: bool = False


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, whatever it is doing then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def block_startup_signals() -> Generator[None]:
    """Block the startup signals in processes that this thread starts inside the context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STARTUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handling(handlers: Mapping[int, Handler]) -> Generator[None]:
    """Handle these signals inside the context. Enter it in the main thread."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def install_startup_handlers(quiet: Quiet) -> None:
    """Handle the startup signals, pending ones included, until the daemon installs its own handlers.

    Call this in the main thread before other threads start.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGUSR1:  # there is no sequence to log yet
            quiet.is_asked = number == signal.SIGTSTP

    for number in (*STARTUP_SIGNALS, signal.SIGCONT):
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STARTUP_SIGNALS)


@contextmanager
def interrupts_held() -> Generator[None]:
    """Hold SIGINT back, and call its handler at the end of the block. Does nothing outside the main thread.

    The handler is replaced because a signal mask does not suffice: another thread may receive the signal, and Python
    still runs the handler in the main thread.
    """
    handler = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or not callable(handler):  # Python calls nothing
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[-1])
