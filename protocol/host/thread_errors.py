"""End a process when an error ends one of its threads.

By default Python prints the error and the other threads continue, so the thread's work stops silently.
"""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

EXIT_CODE = 1


@contextmanager
def ended_by_thread_errors(report: Callable[[str, BaseException], object]) -> Generator[None]:
    """End the process with code 1 when an error ends a thread inside the context.

    The end is immediate, because any lock may be held: the process is one that may be killed at any moment.

    Args:
        report: Logs the error; takes the name of the thread, and the error.
    """

    def end(found: threading.ExceptHookArgs) -> None:
        if issubclass(found.exc_type, SystemExit):
            return
        try:
            name = "unknown" if found.thread is None else found.thread.name
            report(name, found.exc_value or found.exc_type())
        finally:
            os._exit(EXIT_CODE)

    before, threading.excepthook = threading.excepthook, end
    try:
        yield
    finally:
        threading.excepthook = before
