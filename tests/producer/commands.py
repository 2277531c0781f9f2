"""The `producer` command, run by tests: in a process of its own, or (fixture `run`) in theirs."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tests.servers import RedisServer


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    def output(self) -> str:
        """What it printed. It must have succeeded."""
        assert self.code == 0, self.err
        return self.out


Run: TypeAlias = Callable[..., Ended]
"""Runs `producer` with these arguments; `stdin=` is its standard input, in bytes."""


def run_producer(server: RedisServer, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `producer` in a folder, in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    environ |= {"SLUICE_STATE_DIR": str(folder / "state"), "SLUICE_REDIS_URL": server.url}
    command = [sys.executable, "-P", "-m", "sluice.producer", *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)
