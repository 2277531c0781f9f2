"""Processes of the gateway's benchmarks: a server, a worker of the null model, a gateway, and a cheap client."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, environment, free_port, server, version_of_server, wait_until, worker
from benchmarks.queue.ours import NULL
from sluice.protocol.keys import QueueKeys

PACKAGES = ("uvicorn", "h11", "starlette", "redis", "hiredis")


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway, and the server of its queue."""

    pid: int
    port: int
    redis_port: int
    is_realtime: bool = False


@contextmanager
def served(*options: str, model: str | None, is_realtime: bool = False) -> Generator[Served]:
    """Run a server, a gateway and, if a model is given, a worker with these options.

    `is_realtime` runs all of them in the system's real-time class, as `schedule` says.
    """
    redis_port = free_port()
    with (
        schedule(1 if is_realtime else 0),
        server(redis_port) as here,
        environment({"SLUICE_REDIS_URL": f"redis://127.0.0.1:{redis_port}"}),
        _gateway(here.folder / "gateway.log") as (process, port),
        worker(here, *NULL, *options, model=model, is_alone=True) if model else nullcontext(),
    ):
        yield Served(process.pid, port, redis_port, is_realtime)


@contextmanager
def schedule(priority: int) -> Generator[None]:
    """Start processes in the real-time class; 0 does nothing. It needs root, and shields a run from other work."""
    if not priority:
        yield
        return
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


@contextmanager
def _gateway(log: Path) -> Generator[tuple["subprocess.Popen[bytes]", int]]:
    """Run a gateway without keys for the duration of the context; yield it with its port."""
    options = ("serve", "--port", "0", "--address-connections", "10000")
    command = [sys.executable, "-P", "-m", "sluice.producer", *options]
    with log.open("wb") as output, subprocess.Popen(command, cwd=ROOT, stderr=output) as process:
        try:
            wait_until(lambda: _port_in(log) > 0, "the gateway", process)
            yield process, _port_in(log)
        finally:
            process.kill()


def _port_in(log: Path) -> int:
    found = re.search(r'"url": "http://[^"]*:([0-9]+)/v1"', log.read_text())
    return int(found[1]) if found else 0


def ask_client(served: Served, task: str, **values: Any) -> Any:  # noqa: ANN401 - JSON, as given and as printed
    """Run a task of `client.py` in a process of its own; return what it printed."""
    given = {"port": served.port, "redis_port": served.redis_port, "outbox": QueueKeys("default").outbox, **values}
    command = [sys.executable, "-m", "benchmarks.gateway.client", task, json.dumps(given)]
    with schedule(2 if served.is_realtime else 0):  # before the others: it must read at once
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the client failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


def machine() -> str:
    """Return the hardware, the load and the versions that figures depend on."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"{_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, "
        f"{versions}, {version_of_server()}"
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
