"""A gateway as a process, with what its client needs to reach it."""

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import httpx
import openai

from tests.end_to_end.processes import ROOT


@dataclass(frozen=True)
class GatewayProcess:
    """One `producer serve`."""

    process: subprocess.Popen[str]
    url: str

    def client(self) -> openai.OpenAI:
        """The stock client, without retries of its own."""
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def http(self) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.url.removesuffix("/v1"), timeout=60)


@contextmanager
def gateway_process(redis_url: str, *arguments: str) -> Generator[GatewayProcess]:
    """A gateway on a free port that does not outlive the test."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    command = [sys.executable, "-P", "-m", "sluice.producer", "serve", "--port", "0", "--redis-url", redis_url]
    with subprocess.Popen([*command, *arguments], cwd=ROOT, env=environ, text=True, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            yield GatewayProcess(process, _url_in(process.stderr))
        finally:
            process.kill()


def _url_in(stderr: IO[str]) -> str:
    said = stderr.readline()
    assert " on http://" in said, said + stderr.read()
    return said.rpartition(" ")[2].strip()


def data_lines(lines: Iterator[str]) -> list[str]:
    """The data of server-sent events."""
    return [line.removeprefix("data: ") for line in lines if line]
