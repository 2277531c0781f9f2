"""A client that costs little, in a process of its own: raw sockets in one loop, and arrival times of the kernel.

    python -m benchmarks.gateway.client TASK JSON

The kernel stamps what arrives (SO_TIMESTAMPNS), so the time that this process needs to read it is in no figure. What
has arrived by the time of one read has the stamp of its last byte: a late read makes a time longer, never shorter.
"""

import json
import re
import resource
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Any

import hiredis

from sluice.protocol.job_ids import split_job_id
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import unpack_from_script

SO_TIMESTAMPNS = 35
STAMP = struct.Struct("qq")
JOB = re.compile(rb'"id":"(?:chatcmpl|cmpl)-([^"]+)"')
END = b"0\r\n\r\n"
RECEIVE_BYTES = 64 * 1024
START_EVERY_S = 0.03
LATE_NS = 1_000_000


class Loop:
    """Connections of one thread. Changes as they are opened and closed."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._planned: list[tuple[float, int, Callable[[], None]]] = []

    def plan(self, after_s: float, what: Callable[[], None]) -> None:
        """Do something later."""
        heappush(self._planned, (time.monotonic() + after_s, len(self._planned), what))

    def connect(self, port: int, received: Callable[[bytes, int], None]) -> socket.socket:
        """Open a connection; `received` gets what arrives, and when."""
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, received)
        return sock

    def close(self, sock: socket.socket) -> None:
        """Close a connection."""
        self._selector.unregister(sock)
        sock.close()

    def run(self, is_over: Callable[[], bool], limit_s: float) -> None:
        """Hand on what arrives until something is over.

        Raises:
            RuntimeError: it is not over in time, or a connection was closed.
        """
        until_s = time.monotonic() + limit_s
        while not is_over():
            if time.monotonic() > until_s:
                raise RuntimeError(f"not over after {limit_s:g} s")
            wait_s = min(0.5, self._planned[0][0] - time.monotonic()) if self._planned else 0.5
            for key, _ in self._selector.select(max(0.0, wait_s)):
                num_bytes, stamps, _, _ = key.fileobj.recvmsg_into([self._buffer], 64)
                if not num_bytes:
                    raise RuntimeError("a connection was closed")
                key.data(bytes(self._buffer[:num_bytes]), _ns(stamps))
            while self._planned and self._planned[0][0] <= time.monotonic():
                heappop(self._planned)[2]()


def _ns(stamps: list[tuple[int, int, bytes]]) -> int:
    if not stamps:
        return time.time_ns()  # the first bytes after the option was set
    seconds, ns = STAMP.unpack(stamps[0][2])
    return seconds * 1_000_000_000 + ns


class Stream:
    """One connection that sends one streaming request after another. Changes with each."""

    def __init__(self, loop: Loop, port: int, ended: "Callable[[Stream], None]") -> None:
        self._sock, self._ended = loop.connect(port, self._received), ended
        self.sent_ns = self.first_ns = self.num_events = 0
        self.job_id = ""
        self._begin = self._tail = b""

    def send(self, body: Mapping[str, Any]) -> None:
        """Send a request."""
        content = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self.first_ns = self.num_events = 0
        self._begin = self._tail = b""
        self.sent_ns = time.time_ns()
        self._sock.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)

    def _received(self, data: bytes, at_ns: int) -> None:
        self.num_events += data.count(b"data: ")
        if not self.first_ns:
            self._begin += data
            if found := JOB.search(self._begin):
                self.first_ns, self.job_id = at_ns, found[1].decode()
            elif b"\r\n\r\n" in self._begin and not self._begin.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"refused: {self._begin!r}")
        self._tail = (self._tail + data)[-len(END) :]
        if self._tail == END:
            self._ended(self)


class Channels:
    """Reads the first entry of each new job's channel, on a connection that waits for nothing else.

    It learns of jobs from the events that their submits write. Changes as they arrive.
    """

    def __init__(self, loop: Loop, port: int, outbox: str) -> None:
        self._loop, self._port, self._outbox = loop, port, outbox
        self._free: list[_Waiting] = []
        self.first_ns: dict[str, int] = {}
        self.queued_ns: dict[str, int] = {}
        self.num_late = 0
        """Tokens that may have been there before the read; they are left out."""
        self._events = loop.connect(port, self._submitted)
        self._after, self._reader = "$", hiredis.Reader()
        self._wait_for_events()

    def _wait_for_events(self) -> None:
        self._events.sendall(_command("XREAD", "BLOCK", "0", "STREAMS", self._outbox, self._after))

    def _submitted(self, data: bytes, at_ns: int) -> None:
        self._reader.feed(data)
        if (reply := self._reader.gets()) is False:
            return
        for entry_id, fields in reply[0][1]:
            self._after = entry_id.decode()
            for kind, job_id, *_ in unpack_from_script(fields[1]):
                if kind == b"submitted":
                    self.queued_ns[job_id.decode()] = at_ns
                    self._follow(job_id.decode())
        self._wait_for_events()

    def _follow(self, job_id: str) -> None:
        waiting = self._free.pop() if self._free else _Waiting(self, self._loop, self._port)
        waiting.begin(job_id)

    def arrived(self, waiting: "_Waiting", at_ns: int) -> None:
        """Note a first entry. One that came at once may be older than the read."""
        if at_ns - waiting.asked_ns < LATE_NS:
            self.num_late += 1
        else:
            self.first_ns[waiting.job_id] = at_ns
        self._free.append(waiting)


class _Waiting:
    """A connection that waits for one first entry at a time."""

    def __init__(self, channels: Channels, loop: Loop, port: int) -> None:
        self._channels = channels
        self._sock = loop.connect(port, self._received)
        self.job_id, self.asked_ns = "", 0
        self._is_waiting = False

    def begin(self, job_id: str) -> None:
        """Wait for the first entry of a job."""
        self.job_id, self.asked_ns, self._is_waiting = job_id, time.time_ns(), True
        channel = QueueKeys("default").key("channel", *split_job_id(job_id)[1:], 0)
        self._sock.sendall(_command("XREAD", "COUNT", "1", "BLOCK", "0", "STREAMS", channel, "0-0"))

    def _received(self, _data: bytes, at_ns: int) -> None:
        if self._is_waiting:  # an entry fits into one packet
            self._is_waiting = False
            self._channels.arrived(self, at_ns)


def _command(*words: str) -> bytes:
    encoded = [word.encode() for word in words]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)


def _body(max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Name three rivers and where they flow."}]
    return {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}


# ---------------------------------------------------------------- tasks


def follow(given: Mapping[str, Any]) -> object:
    """Keep this many streams open until enough have ended; return the times of each pair, and what was counted."""
    loop = Loop()
    channels = Channels(loop, given["redis_port"], given["outbox"]) if given.get("is_paired") else None
    ended: list[tuple[str, int, int]] = []
    num_events, num_sent, num_streams = 0, 0, given["streams"]

    def send(stream: Stream) -> None:
        nonlocal num_sent
        if num_sent < given["requests"]:
            num_sent += 1
            # Jobs of different lengths: or all streams would begin again in one step.
            stream.send(_body(given["max_tokens"] + (num_sent * 7) % (1 + given.get("spread", 0))))

    def on_end(stream: Stream) -> None:
        nonlocal num_events
        num_events += stream.num_events
        ended.append((stream.job_id, stream.sent_ns, stream.first_ns))
        send(stream)

    # One by one: a burst of first requests is not what is measured.
    for number in range(num_streams):
        loop.plan(number * START_EVERY_S, lambda: send(Stream(loop, given["port"], on_end)))
    loop.run(lambda: len(ended) == given["requests"], given.get("limit_s", 300))
    found: dict[str, Any] = {"events": num_events, "ttft_ms": [(first - sent) / 1e6 for _, sent, first in ended]}
    if channels is not None:
        times = channels.first_ns
        found["added_ms"] = [(first - times[job]) / 1e6 for job, _, first in ended if job in times]
        found["queued_ms"] = [(channels.queued_ns[job] - sent) / 1e6 for job, sent, _ in ended]
        found["late"] = channels.num_late
    return found


def hold(given: Mapping[str, Any]) -> object:
    """Open streams whose jobs do not start; hold them until the input ends."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop, num_open = Loop(), 0

    def answered(data: bytes, _at_ns: int) -> None:
        nonlocal num_open
        if not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"refused: {data!r}")
        num_open += 1

    content = json.dumps(_body(100)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    for number in range(given["streams"]):
        sock = loop.connect(given["port"], answered)
        sock.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        loop.run(lambda number=number: num_open >= number - 32, 60)
    loop.run(lambda: num_open == given["streams"], 60)
    print(json.dumps({"open": num_open}), flush=True)
    sys.stdin.read()
    return {}


if __name__ == "__main__":
    print(json.dumps({"follow": follow, "hold": hold}[sys.argv[1]](json.loads(sys.argv[2]))))
