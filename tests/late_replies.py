"""A relay before a server: its replies are late, as over a long line."""

import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

CHUNK_BYTES = 1 << 16


@contextmanager
def late_replies(target: Path, delay_s: float) -> Generator[str]:
    """The URL of a relay to a server's socket, whose every reply is late by `delay_s`."""
    with TemporaryDirectory(prefix="late-") as folder, socket.socket(socket.AF_UNIX) as listening:
        path = Path(folder) / "relay.sock"
        listening.bind(str(path))
        listening.listen(64)
        threading.Thread(target=_accept, args=(listening, target, delay_s), daemon=True).start()
        try:
            yield f"unix://{path}"
        finally:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket, target: Path, delay_s: float) -> None:
    with suppress(OSError):
        while True:
            near, _ = listening.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(target))
            threading.Thread(target=_carry, args=(near, far, 0.0), daemon=True).start()
            threading.Thread(target=_carry, args=(far, near, delay_s), daemon=True).start()


def _carry(source: socket.socket, sink: socket.socket, delay_s: float) -> None:
    with suppress(OSError):
        while piece := source.recv(CHUNK_BYTES):
            time.sleep(delay_s)
            sink.sendall(piece)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    source.close()
