"""A unix-socket proxy that breaks connections at a point that a test chooses: a call was sent, its reply is lost."""

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

POLL_S = 0.05

Cut = Callable[[bytes], bool]
"""Whether the reply to these request bytes is to be lost."""

Kind = Literal["cut", "half-open"]
"""Cut: the server acts, and the connection ends. Half-open: it stays open, but carries no data in either direction."""


class CuttingProxy:
    """A proxy before a server. Mutable: it counts cuts."""

    def __init__(self, listen: Path, target: Path, cut: Cut, kind: Kind) -> None:
        self._target = target
        self._is_swallowing = kind == "half-open"
        self._cut = cut
        self._lock = threading.Lock()
        self._is_closing = False
        self._threads: list[threading.Thread] = []
        self.num_cuts = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(listen))
        self._socket.listen()
        self._socket.settimeout(POLL_S)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        self.url = f"unix://{listen}"

    def close(self) -> None:
        """Accept no more connections, and close the open ones."""
        self._is_closing = True
        for thread in (self._thread, *self._threads):
            thread.join(5)
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                client, _ = self._socket.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, client: socket.socket) -> None:
        """Carry bytes both ways until one side ends, or a reply is to be lost."""
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            client.settimeout(None)
            server.connect(str(self._target))
            is_cut = False
            while not self._is_closing:
                ready, _, _ = select.select([client, server], [], [], POLL_S)
                for source in ready:
                    data = source.recv(1 << 16)
                    # A cut: the server has executed the call, but its reply is lost.
                    if not data or (source is server and is_cut and not self._is_swallowing):
                        return
                    is_cut = is_cut or (source is client and self._cut_now(data))
                    if is_cut and self._is_swallowing:
                        continue
                    (server if source is client else client).sendall(data)

    def _cut_now(self, data: bytes) -> bool:
        with self._lock:
            is_now = self._cut(data)
            self.num_cuts += is_now
            return is_now


@contextmanager
def cutting_proxy(listen: Path, target: Path, cut: Cut, kind: Kind = "cut") -> Generator[CuttingProxy]:
    """Run a proxy for the time of a test."""
    proxy = CuttingProxy(listen, target, cut, kind)
    try:
        yield proxy
    finally:
        proxy.close()
