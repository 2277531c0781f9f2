"""The parts that the service's benchmarks start: a real server in a folder of its own, and worker processes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from producer import embedded
from producer.client import Producer

WAIT_S = 300.0


@contextmanager
def own_server() -> Iterator[Path]:
    """A fresh embedded server (unix socket, append-only file every second) that everything started inside will use."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        before = os.environ.get("SLUICE_STATE_DIR")
        os.environ["SLUICE_STATE_DIR"] = folder
        for name in ("SLUICE_REDIS_URL", "SLUICE_DATABASE_URL"):
            os.environ.pop(name, None)
        embedded.ensure(Path(folder))
        try:
            yield Path(folder)
        finally:
            embedded.stop(Path(folder))
            if before is None:
                del os.environ["SLUICE_STATE_DIR"]
            else:
                os.environ["SLUICE_STATE_DIR"] = before


@contextmanager
def worker(
    *options: str, log: Path, device: Sequence[str] = ("--cpu",), limit_s: float = WAIT_S
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process that is ready to pull; drained at the end."""
    command = [sys.executable, "-m", "worker", "start", *device, "--metrics-port", "0", *options]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            with Producer() as producer:
                wait_until(lambda: bool(producer.queue()[0].workers), "the worker to start", process, limit_s=limit_s)
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def wait_until(
    holds: Callable[[], bool],
    what: str,
    process: subprocess.Popen[bytes] | None = None,
    every_s: float = 0.02,
    limit_s: float = WAIT_S,
) -> None:
    """Wait for something of which only the state can be asked.

    Raises:
        RuntimeError: the process ended, or it took too long.
    """
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"waiting for {what}: the process ended with {process.returncode}")
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"waited {limit_s:g} s for {what}")
        time.sleep(every_s)


def num_done(producer: Producer) -> int:
    """Jobs of the queue that are done."""
    return sum(view.totals.get("done", 0) for view in producer.queue())


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
