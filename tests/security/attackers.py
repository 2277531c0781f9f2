"""Everything that one key of few requests a minute can do to a gateway, at once: `python -m tests.security.attackers`.

Each attack repeats on a thread of its own, at most ten times a second, until the process is killed. The address must be
a loopback address.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from urllib.parse import urlsplit

import httpx

from sluice.gateway.settings import is_loopback

MIB = 1024 * 1024
PAUSE_S = 0.1
CHAT = "/v1/chat/completions"


def hostile_bodies() -> list[bytes]:
    """Bodies that take long to refuse."""
    return [
        b'{"prompt": "x", "' + b"n" * (8 * MIB - 100) + b'": 1}',
        b"{" + b",".join(b'"%07d":1' % number for number in range(600_000)) + b"}",
        b'{"prompt": "x", "seed": [' + b",".join([b"1.5"] * 499_000) + b"]}",
    ]


def batch_lines() -> list[str]:
    """The lines of a batch of 40,000 choices."""
    body = {"model": "null", "messages": [{"role": "user", "content": "x"}], "max_tokens": 64, "n": 8}
    line = {"method": "POST", "url": CHAT, "body": body}
    return [json.dumps({**line, "custom_id": str(number)}) for number in range(5000)]


class Attacker:
    """One key at one gateway. Changes: it keeps connections open.

    Args:
        url: Of the gateway.
        key: Its key.
    """

    def __init__(self, url: str, key: str) -> None:
        where = urlsplit(url)
        assert is_loopback(where.hostname or "")
        self._address, self._key = (where.hostname or "", where.port or 0), key
        headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=f"http://{where.netloc}", timeout=30, headers=headers)
        self._numbers = count()
        self._kept: list[socket.socket] = []
        self._file_id = ""

    def stall(self) -> None:
        """Send a body of which the end is missing, and keep the connection; at most 32 of them."""
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self._key}\r\n"
        self._keep(f"{head}content-length: {8 * MIB}\r\n\r\n".encode() + b" " * (8 * MIB - 1), most=32)
        time.sleep(1)

    def send_headers(self) -> None:
        """Send thousands of headers, without a key."""
        with socket.create_connection(self._address, timeout=30) as opened:
            opened.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + b"a:\r\n" * 7500 + b"\r\n")
            opened.recv(1000)

    def post(self, content: bytes) -> None:
        """Send a body that is refused."""
        self._http.post("/v1/completions", content=content)

    def download(self) -> None:
        """Ask for a file, and read nothing of it; at most 200 of them."""
        self._file_id = self._file_id or self.upload("z" * 4 * MIB)
        head = f"GET /v1/files/{self._file_id}/content HTTP/1.1\r\nhost: localhost\r\n"
        self._keep(f"{head}authorization: Bearer {self._key}\r\n\r\n".encode(), most=200)

    def begin_batch(self, lines: str) -> None:
        """Upload a file and create its batch."""
        if file_id := self.upload(lines):
            made = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            self._http.post("/v1/batches", json=made)
        time.sleep(1)

    def submit(self) -> None:
        """Submit a job of 64 choices."""
        self._http.post("/jobs", json={"prompt": "x", "n": 64, "max_tokens": 8, "model": "null"})

    def read(self) -> None:
        """Read lists."""
        self._http.get("/v1/files?limit=10000")
        self._http.get("/jobs?limit=1000")

    def upload(self, text: str) -> str:
        """Store a file; return its id, or nothing if it is refused."""
        files = {"file": (f"{next(self._numbers)}.jsonl", text)}
        answer = self._http.post("/v1/files", data={"purpose": "batch"}, files=files)
        return str(answer.json().get("id", "")) if answer.is_success else ""

    def _keep(self, data: bytes, *, most: int) -> None:
        kept = self._kept
        opened = socket.create_connection(self._address, timeout=30)
        kept.append(opened)
        with suppress(OSError):
            opened.sendall(data)
        while len(kept) > most:
            kept.pop(0).close()


def repeat(attack: Callable[[], object]) -> None:
    """Repeat an attack for ever; what the gateway refuses or resets is no error."""
    while True:
        with suppress(httpx.HTTPError, OSError):
            attack()
        time.sleep(PAUSE_S)


def attacks(url: str, key: str) -> Iterator[Callable[[], object]]:
    """Yield the attacks. Each has an attacker of its own, which keeps what that one opens."""
    lines, new = batch_lines(), partial(Attacker, url, key)
    yield from (new().stall, new().send_headers, new().download, new().submit, new().read)
    for body in hostile_bodies():
        yield partial(new().post, body)
    for text in ("\n".join([*lines * 4, "{"]), "\n".join(lines)):
        yield partial(new().begin_batch, text)
    yield partial(new().upload, "y" * 4 * MIB)


def main() -> None:
    """Attack until killed."""
    os.nice(19)  # attackers are on other machines: the gateway's cores are not theirs
    threads = [threading.Thread(target=repeat, args=(attack,)) for attack in attacks(*sys.argv[1:])]
    for thread in threads:
        thread.start()
    print("attacking", flush=True)  # noqa: T201  # its starter waits for it
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
