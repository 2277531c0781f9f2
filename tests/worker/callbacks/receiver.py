"""A real HTTP server that takes webhooks, answers as a test sets, and remembers what it got."""

import ssl
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(slots=True, eq=False)
class Receiver:
    """What the server got, and what it answers next. Changes with each request."""

    url: str = ""
    answers: list[int] = field(default_factory=list[int])
    """Statuses to answer with, in turn; 200 when there are no more."""

    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list[tuple[dict[str, str], bytes]])
    """(headers, body) of each request, in order."""

    paths: list[str] = field(default_factory=list[str])


@contextmanager
def receiver(tls: ssl.SSLContext | None = None) -> Generator[Receiver]:
    """A running server on loopback; with `tls` it speaks HTTPS."""
    state = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the base class's name
            body = self.rfile.read(int(self.headers["content-length"]))
            state.paths.append(self.path)
            state.got.append((dict(self.headers.items()), body))
            status = state.answers.pop(0) if state.answers else 200
            self.send_response(status)
            if status in (301, 302, 307, 308):
                self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        scheme, host = ("http", "127.0.0.1") if tls is None else ("https", "localhost")
        state.url = f"{scheme}://{host}:{server.server_address[1]}/hook?of=sluice"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
