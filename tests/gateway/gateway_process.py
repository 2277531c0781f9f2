"""A gateway as a process, with what its client needs to reach it."""

import json
import os
import re
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import httpx
import openai
import sqlalchemy as sa

from sluice.gateway.api_keys.key import ApiKey, new_secret, split_key
from sluice.gateway.api_keys.store import KeyStore
from sluice.history.database import open_database
from sluice.history.tables import api_keys
from sluice.protocol.keys import QueueKeys
from sluice.protocol.wire import JobSpec, decode_events, decode_spec
from tests.end_to_end.processes import START_TIMEOUT_S
from tests.forks import Process, start
from tests.servers import RedisServer


@dataclass(frozen=True)
class GatewayProcess:
    """One `producer serve`."""

    process: Process
    url: str
    log: Path
    clients: ExitStack = field(default_factory=ExitStack)
    """Closes the clients at the end. One that only an exception holds would be freed in any order, and warn."""

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The requests in its log."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == "request answered"]

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """The stock client, without retries of its own."""
        made = openai.OpenAI(base_url=self.url, api_key=api_key, max_retries=0, timeout=60)
        return self.clients.enter_context(made)

    def http(self, api_key: str | None = None) -> httpx.Client:
        """A plain client."""
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        return httpx.Client(base_url=self.url.removesuffix("/v1"), timeout=60, headers=headers)

    def get(self, path: str, api_key: str | None = None, **headers: str) -> httpx.Response:
        """The answer to one request."""
        with self.http(api_key) as http:
            return http.get(path, headers=headers)


@contextmanager
def gateway_process(
    redis_url: str, *arguments: str, database_url: str = "sqlite:////nowhere/keys.db", is_fork: bool = True
) -> Generator[GatewayProcess]:
    """A gateway on a free port that does not outlive the test; without `database_url` it has no keys."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    environ |= {"SLUICE_REDIS_URL": redis_url, "SLUICE_DATABASE_URL": database_url}
    command = ("sluice.producer", "serve", "--port", "0", *arguments)
    with TemporaryDirectory() as folder:
        log = Path(folder, "gateway.log")
        process = start(command, environ, log, is_fork=is_fork)
        try:
            made = GatewayProcess(process, _url_in(log, process), log)
            with made.clients:
                yield made
        finally:
            process.kill()
            process.wait()


def _url_in(log: Path, process: Process) -> str:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (found := re.search(r'"gateway started", "url": "(http[^"]+)"', log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.005)
    return found[1]


def data_lines(lines: Iterator[str]) -> list[str]:
    """The data of server-sent events."""
    return [line.removeprefix("data: ") for line in lines if line]


def new_key(database_url: str, tenant: str, **fields: Any) -> str:  # Any: a key's fields are of several types
    """Create a key as `producer keys create` does, and return its text."""
    text, key_id, digest = new_secret()
    fields = {"created_ms": round(time.time() * 1000), **fields}
    with KeyStore(database_url, is_writer=True) as store:
        store.add(ApiKey(id=key_id, digest=digest, tenant=tenant, **fields))
    return text


def delete_all(database_url: str) -> None:
    """Empty the table of keys."""
    write(database_url, api_keys.delete())


def write(database_url: str, statement: sa.Executable) -> None:
    """Change the table of keys as no client does."""
    engine = open_database(database_url, is_writer=True)
    with engine.begin() as connection:
        connection.execute(statement)
    engine.dispose()


def revoke(database_url: str, text: str) -> None:
    """Revoke a key as `producer keys revoke` does."""
    with KeyStore(database_url, is_writer=True) as store:
        assert store.revoke([split_key(text)[0]], round(time.time() * 1000))


def line_of(gateway: GatewayProcess, request_id: str | None) -> dict[str, object]:
    """The line of a request, which is written just after its answer."""
    deadline_s = time.monotonic() + 10
    while True:
        for line in gateway.requests:
            if line["request_id"] == request_id:
                return line
        assert time.monotonic() < deadline_s, gateway.log.read_text()
        time.sleep(0.01)


def spec_of(server: RedisServer, job_id: object) -> JobSpec:
    """Return what was submitted of a job of the queue `default`, which no recorder serves."""
    with server.client() as client:
        for _, fields in client.xrange(QueueKeys("default").outbox):
            for event in decode_events(fields[b"e"]):
                if event.kind == "submitted" and event.job_id == job_id:
                    return decode_spec(cast("bytes", event.fields["spec"]))
    raise AssertionError(f"{job_id} was not submitted")
