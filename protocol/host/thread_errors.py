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

    The process ends at once, because any lock may be held. Use this only in a process that may be killed at any time.

    Args:
        report: Logs the error; takes the name of the thread, and the error.
    """

    def end(args: threading.ExceptHookArgs) -> None:
        if issubclass(args.exc_type, SystemExit):
            return
        try:
            name = "unknown" if args.thread is None else args.thread.name
            report(name, args.exc_value or args.exc_type())
        finally:
            os._exit(EXIT_CODE)

    before, threading.excepthook = threading.excepthook, end
    try:
        yield
    finally:
        threading.excepthook = before
