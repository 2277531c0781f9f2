"""A Redis server for one benchmark: the system's redis-server, else the embedded Valkey; appendfsync everysec."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from sluice.producer.contract.transport import embedded

START_S = 15.0


@dataclass(frozen=True, slots=True)
class PlainServer:
    """A running server, fresh and empty."""

    folder: Path
    client: Any  # redis-py's commands are partly untyped

    @property
    def url(self) -> str:
        """Over its unix socket."""
        return f"unix://{self.folder / 'redis.sock'}"

    def num_commands(self) -> int:
        """Commands processed so far, including those inside scripts."""
        return int(self.client.info("stats")["total_commands_processed"])

    def cpu_s(self) -> float:
        """Processor time used so far."""
        used = self.client.info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def version_of_server() -> str:
    """Return the version of the server."""
    said = subprocess.run([_binary(), "--version"], capture_output=True, text=True, check=True)
    return " ".join(said.stdout.split()[:3])


def _binary() -> str:
    return shutil.which("redis-server") or str(embedded.find_binary())


@contextmanager
def plain_server(port: int = 0) -> Generator[PlainServer]:
    """Run a server for the duration of the context; with a port, it listens there too."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
        folder = Path(name)
        command = [
            _binary(), "--port", str(port), "--unixsocket", str(folder / "redis.sock"), "--dir", name, "--save", "",
            "--appendonly", "yes", "--appendfsync", "everysec",
        ]  # fmt: skip
        with (folder / "server.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            client = redis.Redis(unix_socket_path=str(folder / "redis.sock"))
            _wait_until_ready(client)
            yield PlainServer(folder, client)
        finally:
            process.kill()
            process.wait()


def _wait_until_ready(client: Any) -> None:  # noqa: ANN401 - as in `PlainServer`
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            client.ping()
        except redis.ConnectionError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
        else:
            return
