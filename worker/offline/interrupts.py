"""Keep Ctrl-C out of a change that must not stop halfway."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


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
