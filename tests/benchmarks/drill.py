"""Child of `benchmarks gpu` whose groups fail in every way, as the environment variable DRILL lists them."""

import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.gpu.process import Groups, child_main
from benchmarks.gpu.report import Line


def _raise() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`.")


FAULTS: dict[str, Callable[[], object]] = {
    "raises": _raise,
    "hangs": lambda: time.sleep(60),
    "aborts": os.abort,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(3),
}


def _lines(name: str) -> Iterator[Line]:
    # It is no record.
    os.write(1, b"printed by a library\n")
    if name in FAULTS:
        yield Line(f"first of {name}", {"us": 1.0})
        FAULTS[name]()
    yield Line(name, {"us": 1.0}, is_right=name != "wrong")


def _groups(_arguments: Namespace) -> Groups:
    return {name: partial(_lines, name) for name in os.environ["DRILL"].split(",")}


if __name__ == "__main__":
    sys.exit(child_main(_groups))
