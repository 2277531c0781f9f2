"""Requests that are made to confuse, to hold or to overfill the gateway: raw bytes to a real one."""

import re
import socket
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from sluice.gateway.app import create_router
from sluice.gateway.connections.connection import MAX_HEADER_BYTES, SPARE_CONNECTIONS
from sluice.gateway.keyring import Keyring
from sluice.gateway.settings import GatewaySettings
from sluice.protocol.bounds import HEADERS, PARAMETERS
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.servers import redis_server

pytestmark = pytest.mark.slow

GET = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /jobs HTTP/1.1\r\nhost: localhost\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"
MIB = 1024 * 1024
NOWHERE = "sqlite:////nowhere/keys.db"


@pytest.fixture(scope="module")
def gateway() -> Generator[GatewayProcess]:
    """A gateway that waits half a second for requests."""
    with redis_server("valkey") as server, gateway_process(server.url, "--arrival-limit", "0.5") as made:
        yield made


@contextmanager
def connection(gateway: GatewayProcess) -> Generator[socket.socket]:
    """A connection to the gateway."""
    address = urlsplit(gateway.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as opened:
        yield opened


def read_all(opened: socket.socket) -> bytes:
    """Everything until the gateway closes the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while piece := opened.recv(65536):
            found += piece
    return found


def answers(gateway: GatewayProcess, data: bytes) -> list[int]:
    """The statuses of all answers to these bytes, after which the client sends no more."""
    with connection(gateway) as opened:
        with suppress(OSError):  # it may have closed the connection already
            opened.sendall(data)
            opened.shutdown(socket.SHUT_WR)
        return statuses(read_all(opened))


def statuses(data: bytes) -> list[int]:
    """The statuses of the answers in these bytes."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


def processor_s(pid: int) -> float:
    """Return the processor time of a process, to the nanosecond: `/proc` counts ticks of 0.01 s, and misses some."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes it on Linux


class TestGivenARequestThatTwoProgramsReadDifferently:
    @pytest.mark.parametrize(
        "headers",
        [
            b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
            b"transfer-encoding: chunked\r\ncontent-length: 46\r\n",
            b"content-length: 0\r\ncontent-length: 46\r\n",
            b"content-length: 0, 46\r\n",
            b"content-length: +5\r\n",
            b"content-length: 0x5\r\n",
            b"content-length: 5 5\r\n",
            b"content-length : 5\r\n",
            b"transfer-encoding : chunked\r\n",
            b"transfer-encoding: xchunked\r\n",
            b"transfer-encoding: identity, chunked\r\n",
            b"transfer-encoding: chunked, chunked\r\n",
            b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
            b"transfer-encoding: chunked\r\ncontent-length:\r\n 46\r\n",
            b"x: y\x00\r\n",
            b"x\r: y\r\n",
            b"x: y\rcontent-length: 46\r\n",
            b"host: other\r\n",
        ],
    )
    def test_when_it_is_sent_then_the_rest_is_no_request(self, gateway: GatewayProcess, headers: bytes) -> None:
        found = answers(gateway, POST + headers + b"\r\n0\r\n\r\n" + SMUGGLED)

        assert len(found) == 1
        assert found[0] in (400, 501)

    def test_when_a_header_is_folded_then_it_is_one_header(self, gateway: GatewayProcess) -> None:
        assert answers(gateway, GET + b"x: y\r\n content-length: 46\r\nconnection: close\r\n\r\n") == [200]

    @pytest.mark.parametrize(
        "chunk", [b"0x5\r\nhello\r\n", b"+5\r\nhello\r\n", b"5\r\nhelloXX0\r\n\r\n", b"-1\r\n\r\n"]
    )
    def test_when_a_chunk_is_malformed_then_the_rest_is_no_request(self, gateway: GatewayProcess, chunk: bytes) -> None:
        found = answers(gateway, POST + b"transfer-encoding: chunked\r\n\r\n" + chunk + SMUGGLED)

        assert found in ([400], [])  # the body's fault ends the connection before or after an answer

    @pytest.mark.parametrize(
        ("line", "status"),
        [
            (b"GET /livez HTTP/9.9", 505),
            (b"PRI * HTTP/2.0", 505),
            (b"GET", 400),
            (b"GET  /livez HTTP/1.1", 400),
            (b"\x16\x03\x01", 400),
        ],
    )
    def test_when_its_first_line_is_wrong_then_it_is_refused(
        self, gateway: GatewayProcess, line: bytes, status: int
    ) -> None:
        assert answers(gateway, line + b"\r\nhost: localhost\r\n\r\n" + SMUGGLED) == [status]


class TestGivenARequestThatIsTooMuch:
    @pytest.mark.parametrize("length", [40, 300])
    def test_when_its_headers_are_too_large_then_it_is_refused(self, gateway: GatewayProcess, length: int) -> None:
        assert answers(gateway, GET + b"x: " + b"y" * length * 1024 + b"\r\n\r\n") == [431]

    def test_when_too_large_headers_come_in_pieces_then_the_answer_is_the_same(self, gateway: GatewayProcess) -> None:
        # The last byte is the one that is too much: a reset for unread ones could lose the answer.
        data = (GET + b"x: ").ljust(MAX_HEADER_BYTES + 1, b"y")
        with connection(gateway) as opened:
            opened.sendall(data[:1000])
            opened.sendall(data[1000:])
            found = read_all(opened)

        assert found.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b'"code":"headers_too_large"' in found

    def test_when_it_has_as_many_headers_as_are_allowed_then_it_is_served(self, gateway: GatewayProcess) -> None:
        data = GET + b"connection: close\r\n" + b"a:\r\n" * (HEADERS.most - 2)

        assert answers(gateway, data + b"\r\n") == [200]

    @pytest.mark.parametrize("line", [b"a:\r\n", b"a:\n", b"a: b\r\n c\r\n"])
    def test_when_it_has_more_headers_then_it_is_431(self, gateway: GatewayProcess, line: bytes) -> None:
        assert answers(gateway, GET + line * HEADERS.most + b"\r\n" + SMUGGLED) == [431]

    @pytest.mark.parametrize(
        "body", [b"1\r\na\r\n" * 5000 + b"0\r\n\r\n", b"0\r\n" + b"a:\r\n" * 200 + b"\r\n"], ids=["chunks", "trailers"]
    )
    def test_when_its_body_has_many_parts_then_the_rest_is_not_read(self, gateway: GatewayProcess, body: bytes) -> None:
        found = answers(gateway, POST + b"transfer-encoding: chunked\r\n\r\n" + body + SMUGGLED)

        assert found in ([400], [431], [])

    def test_when_its_query_has_many_parameters_then_it_is_400(self, gateway: GatewayProcess) -> None:
        answer = gateway.get("/ui/sign-in?" + "a=&" * PARAMETERS.most)

        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_parameters")

    @pytest.mark.parametrize(
        "data",
        [
            GET + b"a:\r\n" * 7500 + b"\r\n",
            b"GET /jobs?" + b"a=&" * 10_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
            POST + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 5000 + b"0\r\n\r\n",
            POST + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a:\r\n" * 7500 + b"\r\n",
        ],
        ids=["headers", "parameters", "chunks", "trailers"],
    )
    def test_when_it_is_of_many_small_parts_then_it_costs_about_as_much_as_another(
        self, gateway: GatewayProcess, data: bytes
    ) -> None:
        def cost_s(request: bytes) -> float:
            before_s = processor_s(gateway.process.pid)
            for _ in range(50):
                answers(gateway, request)
            return processor_s(gateway.process.pid) - before_s

        def least_s(request: bytes) -> float:
            return min(cost_s(request) for _ in range(3))  # other processes share caches and cores

        # With bounds up to 7 times as much, without 20 times and more.
        assert least_s(data) < 12 * least_s(GET + b"connection: close\r\n\r\n") + 0.05

    @pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, identity", "x"])
    def test_when_its_body_is_compressed_then_it_is_415(self, gateway: GatewayProcess, coding: str) -> None:
        with gateway.http() as http:
            for path in ("/jobs", "/v1/chat/completions", "/v1/files"):
                answer = http.post(path, content=b"\x1f\x8b", headers={"content-encoding": coding})

                assert (answer.status_code, answer.json()["error"]["code"]) == (415, "encoding_not_supported")

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            (b"[" * MIB, 413),  # too many values to parse
            (b'{"a":' * (MIB // 5), 413),
            (b"[" * 150_000, 400),
            (b'{"a":' * 90_000, 400),
            (b'{"prompt": "x", "max_tokens": ' + b"9" * MIB + b"}", 400),
            (b'{"prompt": "x", "temperature": 1e999}', 400),
            (b'{"prompt": "x", "temperature": NaN}', 400),
            (b'{"prompt": "x", "seed": -1e308}', 400),
            (b'{"prompt": "x", "metadata": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}", 400),
            (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", 400),
            (b'{"token_ids": [' + b"1e400," * 1000 + b"1]}", 400),
            (b'{"prompt": "x", "' + b"n" * MIB + b'": 1}', 400),
            (b"\xff\xfe{}", 400),
            (b'"\\ud800"', 400),
            ('{"prompt": "x", "\\ud800": 1}'.encode("utf-16"), 400),
        ],
        ids=range(15),
    )
    def test_when_its_json_is_hostile_then_it_is_refused_soon(
        self, gateway: GatewayProcess, body: bytes, status: int
    ) -> None:
        with gateway.http() as http:
            for path in ("/jobs", "/v1/completions", "/v1/chat/completions"):
                began_s = time.monotonic()
                answer = http.post(path, content=body)

                assert answer.status_code == status
                assert len(answer.content) < 2000
                assert time.monotonic() - began_s < 3

    @pytest.mark.parametrize(
        ("pattern", "count"),
        [(b'"prompt": "x", "%08000000d": 1', 1), (b'"%07d":1', 600_000), (b'"\\\\%05d\\\\":1', 450_000)],
        ids=["long name", "names", "names with escapes"],
    )
    def test_when_its_names_are_many_or_long_then_it_takes_little_time(
        self, gateway: GatewayProcess, pattern: bytes, count: int
    ) -> None:
        body = b"{" + b",".join(pattern % number for number in range(count)) + b"}"
        own = psutil.Process(gateway.process.pid)
        before_s = sum(own.cpu_times()[:2])

        with gateway.http() as http:
            answer = http.post("/v1/completions", content=body)

        assert answer.status_code in (400, 413)
        assert sum(own.cpu_times()[:2]) - before_s < 0.3  # all of it on the event loop: 1 to 2 s without bounds

    def test_when_it_has_integers_of_thousands_of_digits_then_they_are_not_read(self, gateway: GatewayProcess) -> None:
        with gateway.http() as http:
            answer = http.post("/v1/completions", content=b"[" + b"9" * 1000 + b"]")

        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")

    def test_when_its_body_has_no_end_then_it_is_413_and_the_rest_is_not_read(self, gateway: GatewayProcess) -> None:
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        began_s = time.monotonic()
        with connection(gateway) as opened:
            opened.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
            with suppress(ConnectionError):
                while time.monotonic() - began_s < 20:
                    opened.sendall(chunk)

        assert time.monotonic() - began_s < 15


class TestGivenLargeRequestsAtATime:
    async def test_when_their_bodies_take_too_much_then_one_is_503_until_others_end(self) -> None:
        settings = GatewaySettings(redis_url="redis://127.0.0.1:1", database_url=NOWHERE, max_held_bytes=100_000)
        app = create_router(settings, Keyring(NOWHERE))

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            answers = [await http.post("/jobs", content=b"[" + b" " * size * 1000) for size in (60, 200, 60, 60)]

        assert [answer.status_code for answer in answers] == [400, 503, 400, 400]
        assert answers[1].json()["error"]["code"] == "overloaded"


class TestGivenAClientThatIsSlow:
    @pytest.mark.parametrize(
        ("sent", "status"),
        [
            (b"", []),
            (b"GET /li", [408]),
            (GET, [408]),
            (POST + b"content-length: 100\r\n\r\n{", [408]),
            (POST + b"transfer-encoding: chunked\r\n\r\n5\r\nhe", [408]),
            (GET + b"\r\nGET /li", [200, 408]),
        ],
    )
    def test_when_it_stops_then_its_connection_is_closed(
        self, gateway: GatewayProcess, sent: bytes, status: list[int]
    ) -> None:
        began_s = time.monotonic()
        with connection(gateway) as opened:
            opened.sendall(sent)
            found = statuses(read_all(opened))

        assert found == status
        assert 0.3 < time.monotonic() - began_s < 5

    def test_when_it_sends_byte_by_byte_then_its_connection_is_closed(self, gateway: GatewayProcess) -> None:
        began_s = time.monotonic()
        with connection(gateway) as opened:
            opened.settimeout(0.05)
            data = b""
            for byte in GET + b"x: " + b"y" * 1000:
                opened.sendall(bytes([byte]))
                try:
                    data = opened.recv(65536)
                except TimeoutError:
                    continue
                break

        assert statuses(data) == [408]
        assert time.monotonic() - began_s < 5

    def test_when_it_stops_after_a_large_part_then_that_has_saved_up_no_time(self, gateway: GatewayProcess) -> None:
        began_s = time.monotonic()
        with connection(gateway) as opened:
            opened.sendall(POST + b"content-length: 2000000\r\n\r\n" + b" " * 1_999_999)
            found = statuses(read_all(opened))

        assert found == [408]
        assert time.monotonic() - began_s < 10  # a second for each 16 KiB would be two minutes

    def test_when_its_answer_comes_before_its_body_then_it_is_not_held(self, gateway: GatewayProcess) -> None:
        with connection(gateway) as opened:
            opened.sendall(b"POST /none HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n{")
            found = statuses(read_all(opened))

        assert found == [404]


@contextmanager
def gateway_of_few(arrival_limit_s: int) -> Generator[GatewayProcess]:
    """A gateway of at most 4 connections."""
    limits = ("--arrival-limit", str(arrival_limit_s), "--max-connections", "4")
    with redis_server("valkey") as server, gateway_process(server.url, *limits) as made:
        yield made


class TestGivenManyConnections:
    def test_when_there_are_too_many_then_others_are_told_so_and_it_lives(self) -> None:
        with gateway_of_few(2) as gateway, ExitStack() as stack:
            opened = [stack.enter_context(connection(gateway)) for _ in range(6)]
            last = opened[-1]
            last.sendall(GET + b"\r\n")
            found = statuses(last.recv(65536))

            for one in opened[:-1]:
                assert read_all(one) == b""

            assert found == [503]
            assert gateway.get("/livez").status_code == 200

    @pytest.mark.long
    def test_when_far_too_many_come_then_they_are_closed_unread(self) -> None:
        # Long before the time for a request is over, when others are closed.
        with gateway_of_few(60) as gateway, ExitStack() as stack:
            opened = [stack.enter_context(connection(gateway)) for _ in range(SPARE_CONNECTIONS + 40)]

            assert read_all(opened[-1]) == b""


def test_when_clients_leave_amid_their_bodies_then_the_log_has_no_failure(gateway: GatewayProcess) -> None:
    for _ in range(3):
        with connection(gateway) as opened:
            opened.sendall(POST + b"content-length: 100\r\n\r\n{")
    with gateway.http() as http:
        assert http.get("/livez").status_code == 200

    assert "Traceback" not in gateway.log.read_text()
