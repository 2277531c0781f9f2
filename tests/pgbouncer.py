"""A real PgBouncer for tests, in front of the tests' PostgreSQL: each transaction may get another session."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.postgres import PostgresServer

HOW_TO_GET = "needs PgBouncer: apt-get install pgbouncer"
PoolMode = Literal["transaction", "statement", "session"]
PORT = 6432
"""A part of the socket's name alone."""

START_TIMEOUT_S = 15.0

_SETTINGS = """\
[databases]
* = host={sockets} user=postgres
[pgbouncer]
listen_port = {port}
unix_socket_dir = {folder}
auth_type = any
pool_mode = {mode}
default_pool_size = {num_sessions}
max_client_conn = 200
server_round_robin = 1
"""


def binary() -> str | None:
    """The program; Debian puts it where only root looks."""
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@dataclass(frozen=True, slots=True)
class PgBouncer:
    """A running pooler."""

    folder: str
    """Of its socket."""

    def url(self, database: str) -> str:
        """Connection URL of a database behind it."""
        return f"postgresql://postgres@/{database}?host={self.folder}&port={PORT}"


@contextmanager
def pgbouncer(
    postgres: PostgresServer, *, mode: PoolMode = "transaction", num_sessions: int = 3
) -> Generator[PgBouncer]:
    """A pooler with so few sessions that clients share them, each transaction in the session unused for longest."""
    program = binary()
    assert program is not None, HOW_TO_GET
    data: Path = postgres.handle.pgdata
    owner = data.stat().st_uid
    with tempfile.TemporaryDirectory(prefix="sluice-pgbouncer-") as folder:
        settings = Path(folder) / "pgbouncer.ini"
        settings.write_text(
            _SETTINGS.format(sockets=data, port=PORT, folder=folder, mode=mode, num_sessions=num_sessions)
        )
        Path(folder).chmod(0o777)
        settings.chmod(0o644)  # whatever mask a test has set
        # It refuses to run as root; PostgreSQL's user may use the socket.
        user = owner if os.geteuid() == 0 else None
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen([program, str(settings)], user=user, stderr=log)
        try:
            _wait_for(Path(folder), process)
            yield PgBouncer(folder)
        finally:
            # It keeps nothing. Of other signals some wait for its clients, others are ignored below a background shell.
            process.kill()
            process.wait(START_TIMEOUT_S)


def _wait_for(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not (folder / f".s.PGSQL.{PORT}").exists():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline_s, "PgBouncer does not listen"
        time.sleep(0.01)
