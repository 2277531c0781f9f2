"""A simulated power failure of a real server: it is killed, and its files lose what was not synced to disk.

`kill -9` alone loses no written data: the kernel keeps it. After a power failure a disk is known to have the data
up to the last fsync. A small library, preloaded into the server, records each fsync, and after the
kill each append-only file is truncated to its size at that time.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.servers import Flavor, RedisServer, binary_of, how_to_get

SOURCE = Path(__file__).parent / "synced.c"


class PowerSupply:
    """Of one server. Changes: it can be cut."""

    def __init__(self, server: RedisServer, log: Path) -> None:
        self.server = server
        self._log = log

    def synced_bytes(self) -> dict[Path, int]:
        """How long each file was when it was last brought to disk."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return {Path(path): int(length) for length, _, path in (line.partition(" ") for line in lines)}

    def num_unsynced_bytes(self) -> int:
        """Bytes that a power failure would lose now."""
        synced = self.synced_bytes()
        return sum(path.stat().st_size - synced.get(path, 0) for path in self._files())

    def fail(self) -> int:
        """Kill the server, and truncate its files to what is on disk; return the number of bytes lost."""
        self.server.kill()
        lost, synced = self.num_unsynced_bytes(), self.synced_bytes()
        for path in self._files():
            with path.open("rb+") as file:
                file.truncate(min(path.stat().st_size, synced.get(path, 0)))
        return lost

    def _files(self) -> list[Path]:
        """What is appended to; a base is written once, and brought to disk before it is named."""
        folder = self.server.folder
        return [*folder.glob("appendonlydir/*.incr.aof"), *folder.glob("appendonly.aof")]


@contextmanager
def powered_server(flavor: Flavor, *extra: str) -> Generator[PowerSupply]:
    """A durable server whose power can fail."""
    if binary_of(flavor) is None:
        pytest.skip(how_to_get(flavor))
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: apt-get install gcc")
    with tempfile.TemporaryDirectory(prefix="sluice-") as name:
        folder = Path(name)
        library, log = folder / "synced.so", folder / "synced.log"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", SOURCE, "-o", library, "-ldl"], check=True)
        environ = {"LD_PRELOAD": str(library), "SYNCED_LOG": str(log)}
        server = RedisServer(flavor, folder, is_durable=True, extra=extra, environ=environ)
        server.start()
        try:
            yield PowerSupply(server, log)
        finally:
            server.kill()
