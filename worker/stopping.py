"""Stop a command: at SIGTERM, SIGINT, or the end of standard input, which comes when the parent process ends."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

from sluice.worker.signals import handling

FINISH_S = 5.0
"""For at most this long a recorder that is told to stop drains the outboxes."""

FLUSH_S = 5.0
"""For at most this long it then exports the traces that wait."""


def stopped_by_signals(stop: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `stop` on SIGTERM and SIGINT inside the context."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop()

    return handling({signal.SIGTERM: handle, signal.SIGINT: handle})


def stop_at_eof(stop: Callable[[], None]) -> None:
    """Start a thread that calls `stop` when standard input ends."""
    threading.Thread(target=_wait_for_eof, args=(stop,), name="eof", daemon=True).start()


def _wait_for_eof(stop: Callable[[], None]) -> None:
    # A parent that was killed may reset the connection.
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    stop()
