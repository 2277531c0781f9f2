"""One tenant takes what it can get of a gateway: others are served, and it is told what it holds too much of."""

import json
import socket
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import sqlalchemy as sa

from sluice.gateway.arrival.addresses import Addresses
from sluice.gateway.tables.database import Database
from sluice.history.database import open_database
from sluice.history.tables import audit_log
from sluice.worker.recorder.migrate import migrate
from tests.gateway.gateway_process import GatewayProcess, gateway_process, new_key
from tests.servers import redis_server

pytestmark = pytest.mark.slow

KIB, MIB = 1024, 1024 * 1024
LIMITS = {"tenant-held-mib": 2, "tenant-unread-mib": 1, "tenant-requests": 30, "address-connections": 99}
SCOPES = ("submit", "read", "control", "metrics")
PATIENCE_S = 20


@dataclass(frozen=True)
class Shared:
    """A gateway without a worker that two tenants use."""

    gateway: GatewayProcess
    database_url: str
    low: str
    other: str

    def post(self, key: str, body: bytes) -> httpx.Response:
        """A completion that is refused for its unknown parameter if it is read."""
        with self.gateway.http(key) as http:
            return http.post("/v1/completions", content=body)

    def models_of_low(self) -> httpx.Response:
        """A cheap request."""
        return self.gateway.get("/v1/models", self.low)

    def metrics(self) -> str:
        """The gateway's metrics."""
        return self.gateway.get("/metrics", self.other).text

    def rss(self) -> int:
        """The gateway's memory."""
        return psutil.Process(self.gateway.process.pid).memory_info().rss

    @contextmanager
    def sent(self, key: str, path: str, length: int, body: bytes, *, method: str = "POST") -> Generator[socket.socket]:
        """A request that announces `length` bytes and sends these, on a connection that takes little."""
        where = urlsplit(self.gateway.url)
        with socket.socket() as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
            opened.settimeout(PATIENCE_S)
            opened.connect((where.hostname, where.port))
            head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
            opened.sendall(f"{head}content-length: {length}\r\n\r\n".encode() + body)
            yield opened


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Shared]:
    """The gateway."""
    folder = tmp_path_factory.mktemp("shares")
    url = f"sqlite:///{folder / 'keys.db'}"
    engine = open_database(url, is_writer=True)
    migrate(engine)
    engine.dispose()
    low, other = (new_key(url, tenant, scopes=SCOPES, rpm=rpm) for tenant, rpm in (("low", 1000), ("other", None)))
    flags = [f"--{name}={most}" for name, most in LIMITS.items()] + [f"--files-url=file://{Path(folder, 'files')}"]
    with redis_server("valkey") as server, gateway_process(server.url, *flags, database_url=url) as made:
        yield Shared(made, url, low, other)


def body_of(num_bytes: int) -> bytes:
    """A body that is refused once it is read."""
    return json.dumps({"prompt": "x" * num_bytes, "nothing": 1}).encode()


def code_of(answer: httpx.Response) -> str:
    return answer.json()["error"]["code"]


def wait_for(ask: Callable[[], httpx.Response], status: int, code: str | None = None) -> httpx.Response:
    """Ask until the answer is such a one: what was sent before may not have been read yet."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (answer := ask()).status_code != status or (code is not None and code_of(answer) != code):
        assert time.monotonic() < deadline_s, answer.text
        time.sleep(0.01)  # between two looks
    return answer


class TestGivenATenantWhoseBodiesStall:
    @pytest.fixture(autouse=True)
    def stalled(self, shared: Shared) -> Generator[None]:
        """Six bodies of which a byte is missing: more than the tenant's share."""
        with ExitStack() as stack:
            for _ in range(6):
                stack.enter_context(shared.sent(shared.low, "/v1/completions", 400 * KIB, b" " * (400 * KIB - 1)))
            yield

    def test_when_another_tenant_sends_a_large_body_then_it_is_read(self, shared: Shared) -> None:
        answer = shared.post(shared.other, body_of(2 * MIB - 100 * KIB))

        assert (answer.status_code, code_of(answer)) == (400, "unknown_parameter")

    def test_when_the_tenant_sends_a_further_large_one_then_it_is_429(self, shared: Shared) -> None:
        answer = wait_for(
            lambda: shared.post(shared.low, body_of(2 * MIB - 100 * KIB)), 429, "too_many_bytes_in_flight"
        )

        assert answer.headers["retry-after"] == "1"
        assert 'refused_total{bound="tenant_held_mib"} 0\n' not in shared.metrics()

    def test_when_it_sends_small_ones_then_they_are_read(self, shared: Shared) -> None:
        assert shared.post(shared.low, body_of(10 * KIB)).status_code == 400


class TestGivenATenantThatDoesNotRead:
    @pytest.fixture
    def path(self, shared: Shared) -> str:
        """The content of a file."""
        with shared.gateway.http(shared.low) as http:
            form = {"purpose": "batch"}
            file = http.post("/v1/files", data=form, files={"file": ("a.jsonl", b"x" * 8 * MIB)}).json()
        return f"/v1/files/{file['id']}/content"

    def test_when_it_downloads_much_then_it_is_429_until_it_has_read(self, shared: Shared, path: str) -> None:
        before = shared.rss()
        with ExitStack() as stack:
            for _ in range(25):
                stack.enter_context(shared.sent(shared.low, path, 0, b"", method="GET"))
            refused = wait_for(shared.models_of_low, 429, "too_many_unread_bytes")
            of_other = shared.gateway.get("/v1/models", shared.other)
            taken = shared.rss() - before

        assert refused.headers["retry-after"] == "1"
        assert of_other.status_code == 200
        assert taken < 25 * MIB // 2  # two pieces of a MiB for each before there was a bound
        wait_for(shared.models_of_low, 200)


class TestGivenATenantWithManyOpenRequests:
    def test_when_it_sends_a_further_one_then_it_is_429_and_others_are_served(self, shared: Shared) -> None:
        waiting = json.dumps({"prompt": "x", "stream": True}).encode()
        with ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(shared.sent(shared.low, "/v1/completions", len(waiting), waiting))
            wait_for(shared.models_of_low, 429, "too_many_open_requests")

            assert shared.gateway.get("/v1/models", shared.other).status_code == 200
            assert shared.gateway.get("/livez").status_code == 200


class TestGivenAnAddressWithManyConnections:
    def test_when_it_opens_a_further_one_then_that_is_closed_unread(self, shared: Shared) -> None:
        where = urlsplit(shared.gateway.url)
        with ExitStack() as stack:
            for _ in range(99):
                stack.enter_context(socket.create_connection((where.hostname, where.port), timeout=PATIENCE_S))
            further = stack.enter_context(socket.create_connection((where.hostname, where.port), timeout=PATIENCE_S))
            found = b""
            with suppress(ConnectionResetError):
                found = further.recv(100)

        assert found == b""

    def test_when_it_is_that_of_a_trusted_proxy_then_it_has_no_bound(self) -> None:
        addresses = Addresses(1, ("10.0.0.0/8",))

        found = [addresses.add(address) for address in ("10.1.2.3", "10.1.2.3", "192.0.2.1", "192.0.2.1")]
        addresses.remove("192.0.2.1")

        assert found == [False, False, False, True]
        assert addresses.add("192.0.2.1") is True

    def test_when_it_is_one_of_an_ipv6_network_then_that_has_the_bound(self) -> None:
        addresses = Addresses(1, ())

        found = [addresses.add(address) for address in ("2001:db8::1", "2001:db8::ffff:2", "2001:db8:0:1::1")]

        assert found == [False, True, False]


class TestGivenAClientThatNamesAnotherAddress:
    def test_when_it_is_no_trusted_proxy_then_the_audit_log_has_its_own(self, shared: Shared) -> None:
        headers = {"x-forwarded-for": "192.0.2.7", "origin": shared.gateway.url.removesuffix("/v1")}
        with shared.gateway.http() as http:
            answer = http.post("/ui/sign-in", data={"key": "wrong"}, headers=headers)

        with Database(shared.database_url) as database, database.reading() as connection:
            found = list(connection.execute(sa.select(audit_log.c.target)).scalars())

        assert (answer.status_code, found) == (401, ["127.0.0.1"])
