"""A gateway as a process, with what its client needs to reach it."""

import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import httpx
import openai
import sqlalchemy as sa

from sluice.producer.api_keys.key import ApiKey, new_secret, split_key
from sluice.producer.api_keys.store import KeyStore
from sluice.producer.contract.database import open_database
from sluice.producer.contract.tables import api_keys
from tests.end_to_end.processes import ROOT


@dataclass(frozen=True)
class GatewayProcess:
    """One `producer serve`."""

    process: subprocess.Popen[str]
    url: str

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """The stock client, without retries of its own."""
        return openai.OpenAI(base_url=self.url, api_key=api_key, max_retries=0, timeout=60)

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
    redis_url: str, *arguments: str, database_url: str = "sqlite:////nowhere/keys.db"
) -> Generator[GatewayProcess]:
    """A gateway on a free port that does not outlive the test; without `database_url` it has no keys."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    environ |= {"SLUICE_REDIS_URL": redis_url, "SLUICE_DATABASE_URL": database_url}
    command = [sys.executable, "-P", "-m", "sluice.producer", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environ, text=True, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            yield GatewayProcess(process, _url_in(process.stderr))
        finally:
            process.kill()


def _url_in(stderr: IO[str]) -> str:
    line = stderr.readline()
    assert " on http" in line, line + stderr.read()
    return line.rpartition(" ")[2].strip()


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
