"""A unix-socket proxy that parses requests: it injects one fault into one round trip, chosen by a test.

It stands between a process and its server, so the process needs no hooks. A trap springs once, before the server has
acted (the request never arrives, or arrives too late) or after it has (the reply is lost).
"""

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import hiredis

POLL_S = 0.05
LATE_S = 1.2
"""A reply that is late comes after this long: past the time-out of the processes under test, `CLIENT_TIMEOUT_S`."""

CLIENT_TIMEOUT_S = 0.7
ERROR_REPLY = b"-BUSY injected refusal\r\n"

Command = list[bytes]
Matches = Callable[[Command], bool]


class Fault(StrEnum):
    """The kind of fault."""

    KILL = "kill"
    """The process dies by SIGKILL."""

    CUT = "cut"
    """The connection breaks."""

    LATE = "late"
    """The call outlasts the client's timeout. Before the server acted: it acts after the client's timeout."""

    ERROR = "error"
    """An error reply. After the server acted, the error is false."""


class Moment(StrEnum):
    """The moment of the fault, from the server's view."""

    BEFORE = "before"
    AFTER = "after"


@dataclass(slots=True, eq=False)
class Trap:
    """One fault at one round trip. Changes: it counts, and springs once."""

    matches: Matches
    moment: Moment
    fault: Fault
    kill: Callable[[], None]
    nth: int = 1
    """Which of the round trips that match."""

    sprung: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def springs_at(self, commands: list[Command]) -> bool:
        """Whether this is the round trip."""
        with self._lock:
            if self.nth < 1 or not any(map(self.matches, commands)):
                return False
            self.nth -= 1
            return self.nth == 0


class FaultProxy:
    """A proxy before a server. Mutable: it is armed, and a trap springs."""

    def __init__(self, listen: Path, target: Path) -> None:
        self._target = target
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(listen))
        self._socket.listen()
        self._socket.settimeout(POLL_S)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        self.trap: Trap | None = None
        self.url = f"unix://{listen}"

    def close(self) -> None:
        """Accept no more connections, and close the open ones."""
        self._closing.set()
        for thread in (self._thread, *self._threads):
            thread.join(5)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._socket.accept()
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            client.settimeout(None)
            server.connect(str(self._target))
            _Conversation(client, server, self._closing, lambda: self.trap).carry()


class _Conversation:
    """One client's connection: whole requests one way, replies the other. Changes: it ends where a trap ends it."""

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        closing: threading.Event,
        trap: Callable[[], Trap | None],
    ) -> None:
        self._client = client
        self._server = server
        self._closing = closing
        self._trap = trap
        self._requests: Any = hiredis.Reader()  # Any: it has no types
        self._request = b""
        self._is_over = False

    def carry(self) -> None:
        """Relay until one side ends, or a trap ends it."""
        while not self._is_over and not self._closing.is_set():
            ready, _, _ = select.select([self._client, self._server], [], [], POLL_S)
            for source in ready:
                data = source.recv(1 << 16)
                if not data:
                    return
                if source is self._server:
                    self._client.sendall(data)
                else:
                    self._take(data)

    def _take(self, data: bytes) -> None:
        """Collect a request until it is complete; then forward it, or inject the fault."""
        self._request += data
        self._requests.feed(data)
        commands: list[Command] = []
        while (command := self._requests.gets()) is not False:
            commands.append(command)
        if self._requests.has_data():
            # The rest will follow: complete commands belong to the same round trip.
            self._requests = hiredis.Reader()
            self._requests.feed(self._request)
            return
        request, self._request = self._request, b""
        trap = self._trap()
        if trap is not None and trap.springs_at(commands):
            self._spring(trap, request, len(commands))
        else:
            self._server.sendall(request)

    def _spring(self, trap: Trap, request: bytes, num_commands: int) -> None:
        if trap.moment is Moment.AFTER:
            self._server.sendall(request)
            replies = self._replies(num_commands)
        else:
            replies = b""
        trap.sprung.set()
        match trap.fault:
            case Fault.KILL:
                trap.kill()
                self._is_over = True
            case Fault.CUT:
                self._is_over = True
            case Fault.LATE:
                self._closing.wait(LATE_S)
                if trap.moment is Moment.BEFORE:
                    self._server.sendall(request)
                    replies = self._replies(num_commands)
                self._client.sendall(replies)
            case Fault.ERROR:
                self._client.sendall(ERROR_REPLY * num_commands)

    def _replies(self, count: int) -> bytes:
        """Read the server's replies to so many commands."""
        reader: Any = hiredis.Reader()  # Any: as above
        replies, num_whole = b"", 0
        while num_whole < count:
            data = self._server.recv(1 << 16)
            if not data:
                break
            replies += data
            reader.feed(data)
            while reader.gets() is not False:
                num_whole += 1
        return replies


@contextmanager
def fault_proxy(listen: Path, target: Path) -> Generator[FaultProxy]:
    """Run a proxy for the time of a test."""
    proxy = FaultProxy(listen, target)
    try:
        yield proxy
    finally:
        proxy.close()
