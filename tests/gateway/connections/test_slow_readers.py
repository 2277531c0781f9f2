"""Clients that do not read: their connections are reset, their jobs cancelled, and nothing grows."""

import json
import re
import resource
import socket
import time
from collections.abc import Generator
from contextlib import closing
from urllib.parse import urlsplit

import psutil
import pytest

from sluice.producer import Producer
from sluice.protocol.states import JobState
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.servers import RedisServer

READ_LIMIT_S = 0.5
RECEIVE_BYTES = 4096
"""Of the kernel, for the client; it takes twice as much."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def impatient(queue_server: RedisServer) -> Generator[GatewayProcess]:
    """A gateway that waits only briefly for its clients to read, started where few files may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        with gateway_process(queue_server.url, "--read-limit", str(READ_LIMIT_S)) as made:
            yield made
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_stream(gateway: GatewayProcess, num_choices: int, max_tokens: int) -> tuple[socket.socket, str, bytes]:
    """Send a streaming request; return its connection, the id of its job, and what was read until then."""
    where = urlsplit(gateway.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    client.connect((where.hostname, where.port))
    body = json.dumps({"prompt": "x", "n": num_choices, "max_tokens": max_tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    received = b""
    while (found := re.search(rb'"id":"cmpl-([^"]+)"', received)) is None:
        received += client.recv(1000)
    return client, found[1].decode(), received


def wait_for_end(server: RedisServer, job_id: str) -> JobState:
    """Wait until a job has ended, and return how."""
    with Producer(server.url) as producer:
        while not (state := producer.status(job_id).state).is_terminal:
            time.sleep(0.02)  # no client is told of this end
        return state


def read_until_reset(client: socket.socket) -> bytes:
    """Read what is left, up to the reset."""
    received = b""
    try:
        while data := client.recv(65_536):
            received += data
    except ConnectionResetError:
        return received
    raise AssertionError("the connection ended cleanly")


class TestGivenAClientThatDoesNotRead:
    def test_when_the_limit_has_passed_then_it_is_reset_and_its_job_cancelled(
        self, impatient: GatewayProcess, queue_server: RedisServer
    ) -> None:
        client, job_id, received = open_stream(impatient, num_choices=32, max_tokens=4000)

        state = wait_for_end(queue_server, job_id)
        with closing(client):
            received += read_until_reset(client)

        assert state is JobState.CANCELLED
        assert b"[DONE]" not in received
        assert not received.endswith(b"0\r\n\r\n")

    @pytest.mark.long
    def test_when_its_job_goes_on_then_the_gateway_does_not_grow(
        self, gateway: GatewayProcess, queue_server: RedisServer
    ) -> None:
        process = psutil.Process(gateway.process.pid)
        opened = [open_stream(gateway, num_choices=64, max_tokens=20)]
        wait_for_end(queue_server, opened[0][1])
        before_bytes = process.memory_info().rss

        # About 6 MB of events.
        opened += [open_stream(gateway, num_choices=64, max_tokens=100) for _ in range(4)]
        states = {wait_for_end(queue_server, job_id) for _, job_id, _ in opened[1:]}
        grown_bytes = process.memory_info().rss - before_bytes
        for client, _, _ in opened:
            client.close()

        assert states == {JobState.DONE}
        assert grown_bytes < 3 * 1024 * 1024


class TestGivenAClientThatReadsSlowly:
    @pytest.mark.long
    def test_when_it_goes_on_reading_then_its_connection_stays(self, impatient: GatewayProcess) -> None:
        client, _, received = open_stream(impatient, num_choices=32, max_tokens=4000)
        until_s = time.monotonic() + 6 * READ_LIMIT_S

        with closing(client):
            while time.monotonic() < until_s:
                received = client.recv(32_768)
                time.sleep(READ_LIMIT_S / 10)  # a slow client

        assert received


class TestGivenALowLimitOfOpenFiles:
    def test_when_a_gateway_starts_then_it_raises_its_own_as_far_as_it_may(self, impatient: GatewayProcess) -> None:
        allowed, hard = psutil.Process(impatient.process.pid).rlimit(psutil.RLIMIT_NOFILE)

        assert allowed == hard or allowed > 10_000
