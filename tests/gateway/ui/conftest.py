"""A gateway with keys, and its pages as browsers ask for them."""

import re
from collections.abc import Generator
from dataclasses import dataclass, field

import httpx
import pytest

from tests.end_to_end.processes import WorkerPool, worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process, new_key
from tests.servers import RedisServer, redis_server

IDLE = "idle"
"""A queue without a worker."""

ALL = ("submit", "read", "control", "admin")


class Browser:
    """What a browser does with pages, without their scripts. Changes: it keeps cookies."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=30)

    def sign_in(self, key: str) -> httpx.Response:
        """Send the form of the sign-in."""
        return self.http.post("/ui/sign-in", data={"key": key}, headers={"origin": self.url})

    def get(self, path: str) -> httpx.Response:
        """Open a page."""
        return self.http.get(path)

    def post(self, path: str, **fields: str | list[str]) -> httpx.Response:
        """Send a form as its page would: with the token of the session, from the origin of the page."""
        return self.http.post(path, data={"csrf": self.csrf, **fields}, headers={"origin": self.url})

    @property
    def csrf(self) -> str:
        """The token that forms have."""
        found = re.search(r'name="csrf" value="([^"]+)"', self.get("/ui/").text)
        assert found is not None
        return found[1]


@dataclass(frozen=True)
class Site:
    """A gateway with pages, a worker that records, and keys of two tenants."""

    gateway: GatewayProcess
    server: RedisServer
    workers: WorkerPool
    database_url: str
    _browsers: list[Browser] = field(default_factory=list[Browser])

    @property
    def url(self) -> str:
        """Where the gateway is."""
        return self.gateway.url.removesuffix("/v1")

    def browser(self, key: str | None = None) -> Browser:
        """A browser, signed in with a key if there is one."""
        made = Browser(self.url)
        self._browsers.append(made)
        if key is not None:
            assert made.sign_in(key).status_code == 303
        return made

    def visitor(self, tenant: str = "acme", scopes: tuple[str, ...] = ALL) -> Browser:
        """A browser that is signed in with a new key."""
        key = new_key(self.database_url, tenant, scopes=scopes)
        made = self.browser()
        while made.sign_in(key).status_code != 303:  # the gateway reads the keys twice a second
            pass
        return made

    def close(self) -> None:
        """Close the browsers."""
        for browser in self._browsers:
            browser.http.close()


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory, keys_url: str) -> Generator[Site]:
    """A gateway with keys and a history."""
    new_key(keys_url, "first")
    with redis_server("valkey") as server, worker_pool(server.url, tmp_path_factory.mktemp("site")) as pool:
        worker = pool.start(RECORDER="true", DATABASE_URL=keys_url, TOOL_FORMAT="hermes")
        with gateway_process(server.url, "--queue", "default", "--queue", IDLE, database_url=keys_url) as gateway:
            worker.wait_until_started()
            made = Site(gateway, server, pool, keys_url)
            yield made
            made.close()
