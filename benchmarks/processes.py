"""Processes of the benchmarks: a fresh Redis server that everything started beside it uses, and workers.

Also what processes have used: processor time from /proc is nearly independent of other load.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from sluice.producer.client import Producer
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis import embedded

ROOT = Path(__file__).parents[1]
WAIT_S = 300.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_GROUP, _FIRST_TIME, _NUM_TIMES = 2, 11, 4
"""Fields of /proc/PID/stat after the name: process group; own user and system time, and that of ended children."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, fresh and empty."""

    folder: Path
    client: Any  # redis-py's commands are partly untyped

    @property
    def url(self) -> str:
        """Over its unix socket."""
        return f"unix://{self.folder / 'redis.sock'}"

    def num_commands(self) -> int:
        """Return the commands processed so far, including those inside scripts."""
        return int(self.client.info("stats")["total_commands_processed"])

    def cpu_s(self) -> float:
        """Return the processor time used so far."""
        used = self.client.info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])

    def count(self, name: str) -> int:
        """Return a counter of the queue, such as `done`, with one command: polling must not distort a measurement."""
        return int(self.client.hget(QueueKeys("default").key("counters"), name) or 0)


@contextmanager
def server(port: int = 0) -> Generator[Server]:
    """Run the system's redis-server, else the embedded Valkey: append-only file every second, unix socket.

    Clients and processes that are started inside use it, and a history and files next to it. With a port, it listens
    there too.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
        folder = Path(name)
        command = [
            _binary(), "--port", str(port), "--unixsocket", str(folder / "redis.sock"), "--dir", name, "--save", "",
            "--appendonly", "yes", "--appendfsync", "everysec",
        ]  # fmt: skip
        here = Server(folder, redis.Redis(unix_socket_path=str(folder / "redis.sock")))
        own = {
            "SLUICE_REDIS_URL": here.url,
            "SLUICE_DATABASE_URL": f"sqlite:///{folder / 'history.db'}",
            "SLUICE_FILES_URL": f"file://{folder / 'files'}",
            "SLUICE_STATE_DIR": name,
        }
        with _running(command, folder / "server.log") as process, environment(own):
            wait_until(lambda: _answers(here.client), "the server", process)
            yield here


def version_of_server() -> str:
    """Return the version of the server."""
    said = subprocess.run([_binary(), "--version"], capture_output=True, text=True, check=True)
    return " ".join(said.stdout.split()[:3])


def _binary() -> str:
    return shutil.which("redis-server") or str(embedded.find_binary())


def _answers(client: Any) -> bool:  # noqa: ANN401 - as in `Server`
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables for the duration of the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def _running(command: Sequence[str], log: Path) -> Generator["subprocess.Popen[bytes]"]:
    with log.open("ab") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def worker(
    server: Server,
    *options: str,
    model: str = "null",
    device: Sequence[str] = ("--cpu",),
    is_alone: bool = False,
    limit_s: float = WAIT_S,
    module: str = "sluice.worker",
) -> Generator["subprocess.Popen[bytes]"]:
    """Run a worker that is ready to pull, with a recorder; alone it has neither a recorder nor a parent process.

    It is drained at the end, if it is still alive.
    """
    command = [sys.executable, "-P", "-m", module, "start", *device, "--metrics-port", "0", "--model", model]
    alone = ("--until-eof",) if is_alone else ()
    with Producer() as producer, (server.folder / "worker.log").open("ab") as log:
        before = len(producer.queue()[0].workers)
        process = subprocess.Popen([*command, *alone, *options], stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            try:
                wait_until(
                    lambda: len(producer.queue()[0].workers) > before, "the worker to start", process, limit_s=limit_s
                )
            except RuntimeError as error:
                error.add_note((server.folder / "worker.log").read_text()[-2000:])
                raise
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def wait_until(
    holds: Callable[[], bool],
    what: str,
    process: "subprocess.Popen[bytes] | None" = None,
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


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def process_s(pid: int) -> float:
    """Return the processor seconds of a process, with all its threads and ended children."""
    return sum(map(int, _stat(Path(f"/proc/{pid}"))[_FIRST_TIME : _FIRST_TIME + _NUM_TIMES])) / CLOCK_TICKS


def group_s(group: int) -> float:
    """Return the processor seconds of the processes of a group; ended ones count through their parent."""
    total_s = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(_stat(folder)[_GROUP]) == group:
                total_s += process_s(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total_s


def _stat(folder: Path) -> list[str]:
    return (folder / "stat").read_text().rpartition(")")[2].split()
