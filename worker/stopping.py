"""What stops a command: SIGTERM, SIGINT, or the end of standard input, which comes when the parent process ends."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

FINISH_S = 5.0
"""For at most this long a recorder that is told to stop drains the outboxes."""

FLUSH_S = 5.0
"""For at most this long it then exports the traces that wait."""


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Generator[None]:
    """Call `stop` on SIGTERM and SIGINT inside the context."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop()

    before: dict[signal.Signals, Any] = {  # Any: a handler of any kind
        number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_at_eof(stop: Callable[[], None]) -> None:
    """Start a thread that calls `stop` when standard input ends."""
    threading.Thread(target=_wait_for_eof, args=(stop,), name="eof", daemon=True).start()


def _wait_for_eof(stop: Callable[[], None]) -> None:
    # A parent that was killed may reset the connection.
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    stop()
