"""A real PgBouncer for tests, in front of the tests' PostgreSQL: each transaction may get another session."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.postgres import PostgresServer
from tests.servers import free_port

HOW_TO_GET = "needs PgBouncer: apt-get install pgbouncer"
PoolMode = Literal["transaction", "statement", "session"]
START_TIMEOUT_S = 15.0

_SETTINGS = """\
[databases]
* = host={sockets} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
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

    port: int

    def url(self, database: str) -> str:
        """Connection URL of a database behind it."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"


@contextmanager
def pgbouncer(
    postgres: PostgresServer, *, mode: PoolMode = "transaction", num_sessions: int = 3
) -> Generator[PgBouncer]:
    """A pooler with so few sessions that clients share them, each transaction in the session unused for longest."""
    program = binary()
    assert program is not None, HOW_TO_GET
    data: Path = postgres.handle.pgdata
    owner = data.stat().st_uid
    pooler = PgBouncer(free_port())
    with tempfile.TemporaryDirectory(prefix="sluice-pgbouncer-") as folder:
        settings = Path(folder) / "pgbouncer.ini"
        settings.write_text(_SETTINGS.format(sockets=data, port=pooler.port, mode=mode, num_sessions=num_sessions))
        Path(folder).chmod(0o755)
        # It refuses to run as root; PostgreSQL's user may use the socket.
        user = owner if os.geteuid() == 0 else None
        process = subprocess.Popen([program, "-q", str(settings)], user=user, stderr=subprocess.DEVNULL)
        try:
            _wait_for(pooler.port, process)
            yield pooler
        finally:
            process.send_signal(signal.SIGQUIT)
            process.wait(START_TIMEOUT_S)


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None, f"PgBouncer ended with {process.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline_s, "PgBouncer does not listen"
            time.sleep(0.01)
        else:
            return
