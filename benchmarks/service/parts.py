"""Processes of the service's benchmarks: a real server in its own folder, and workers."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from sluice.producer.client import Producer
from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.transport import embedded

WAIT_S = 300.0


@contextmanager
def own_server() -> Iterator[Path]:
    """Start a fresh embedded server (unix socket, append-only file every second) that everything inside will use."""
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
    *options: str,
    log: Path,
    device: Sequence[str] = ("--cpu",),
    limit_s: float = WAIT_S,
    program: Sequence[str] = ("-P", "-m", "sluice.worker"),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker process that is ready to pull; drained at the end."""
    command = [sys.executable, *program, "start", *device, "--metrics-port", "0", *options]
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
    """Wait for a condition that has to be polled.

    Raises:
        RuntimeError: the process ended, or the wait timed out.
    """
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"waiting for {what}: the process ended with {process.returncode}")
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"waited {limit_s:g} s for {what}")
        time.sleep(every_s)


def num_done(producer: Producer) -> int:
    """Return the number of completed jobs of the queue."""
    return sum(view.totals.get("done", 0) for view in producer.queue())


def num_done_cheaply(client: Any) -> int:  # noqa: ANN401 - redis-py's replies are untyped
    """Return the same, with one command."""
    return int(client.hget(QueueKeys("default").key("counters"), "done") or 0)


def embedded_client(folder: Path) -> Any:  # noqa: ANN401 - as above
    """Return a client of the embedded server in a folder."""
    return redis.Redis(unix_socket_path=str(embedded.ensure(folder).socket_path))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the given percentile (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
