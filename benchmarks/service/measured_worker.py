"""A worker whose processor time can be read by part while it runs.

    LOOP_CLOCKS=FILE python -m benchmarks.service.measured_worker start ...

Every thread has its name in /proc. FILE holds two numbers, seconds of processor time of the loop's thread: in the
model's steps, and in making text of their tokens. All other parts are threads or processes, which /proc tells apart.
"""

import ctypes
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from time import thread_time
from typing import Any

from sluice.engine.execution.threads import limit_spinning

MODULE = "benchmarks.service.measured_worker"
CLOCKS_VARIABLE = "LOOP_CLOCKS"
CLOCKS = struct.Struct("<dd")
STEP, TEXT = 0, 1
_SET_NAME = 15
"""`PR_SET_NAME` of prctl(2); the kernel keeps 15 bytes."""


class LoopClocks:
    """Processor seconds of the loop's thread by part, in a file that the benchmark reads. Mutable."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), CLOCKS.size)
        self._seconds = [0.0, 0.0]

    def timed(self, function: Callable[..., Any], part: int) -> Callable[..., Any]:  # Any: handed through
        """Return `function`, whose time is added to a part."""

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - handed through
            began_s = thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self._seconds[part] += thread_time() - began_s
                CLOCKS.pack_into(self._memory, 0, *self._seconds)

        return run


def _name_threads() -> None:
    """Give each thread that Python starts its name in /proc."""
    prctl, run = ctypes.CDLL(None).prctl, threading.Thread.run

    def run_named(self: threading.Thread) -> None:
        prctl(_SET_NAME, self.name.encode()[:15])
        run(self)

    threading.Thread.run = run_named


def _measure_loop(path: Path) -> None:
    from sluice.engine.execution.isolation import IsolatingExecutor
    from sluice.engine.text.output import Outputs

    clocks = LoopClocks(path)
    IsolatingExecutor.launch = clocks.timed(IsolatingExecutor.launch, STEP)
    IsolatingExecutor.collect = clocks.timed(IsolatingExecutor.collect, STEP)
    Outputs.read = clocks.timed(Outputs.read, TEXT)


def main() -> None:
    """Run the worker command; its children are measured as well."""
    from sluice.worker.cli import main as worker
    from sluice.worker.processes import specs

    specs.WORKER = (sys.executable, "-m", MODULE, "start", "--until-eof")
    _name_threads()
    _measure_loop(Path(os.environ[CLOCKS_VARIABLE]))
    worker()


if __name__ == "__main__":
    limit_spinning()
    main()
