"""`worker top` in a real terminal, beside a real worker."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.processes import ROOT, WorkerPool, worker_pool
from tests.servers import RedisServer

PATIENCE_S = 20.0


class Terminal:
    """A terminal with a program in it. Changes as the program writes."""

    def __init__(self, *command: str) -> None:
        self._descriptor, other = pty.openpty()
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "30"}
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, cwd=ROOT, env=environ)
        os.close(other)
        self.text = ""

    def wait_for(self, words: str) -> None:
        """Until the program has written this since the last key."""
        deadline_s = time.monotonic() + PATIENCE_S
        while words not in self.text:
            assert time.monotonic() < deadline_s, f"no {words!r} in {self.text[-3000:]}"
            if select.select([self._descriptor], [], [], 0.1)[0]:
                read = os.read(self._descriptor, 65536).decode(errors="replace")
                self.text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", read)

    def press(self, key: bytes) -> None:
        """Press a key."""
        self.text = ""
        os.write(self._descriptor, key)

    def close(self) -> None:
        """End the program."""
        self.process.kill()
        self.process.wait()
        os.close(self._descriptor)


@contextmanager
def top(url: str, *flags: str) -> Generator[Terminal]:
    """`worker top` of that server."""
    made = Terminal(sys.executable, "-P", "-m", "sluice.worker", "top", "--redis-url", url, *flags)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path) -> Generator[WorkerPool]:
    with worker_pool(valkey.url, tmp_path) as made:
        yield made


@pytest.mark.slow
class TestGivenAWorker:
    @pytest.mark.long
    def test_when_it_is_quieted_resumed_and_drained_then_it_does_so(
        self, valkey: RedisServer, workers: WorkerPool
    ) -> None:
        worker = workers.start_all(1)[0]
        with top(valkey.url, "--every", "0.2") as terminal:
            terminal.wait_for("pulling")
            for key, state in ((b"z", "quiet"), (b"c", "pulling")):
                terminal.press(key)
                terminal.wait_for("? y/n")
                terminal.press(b"y")
                terminal.wait_for("was asked to")
                terminal.press(b"s")
                terminal.wait_for(state)
            terminal.press(b"d")
            terminal.wait_for("drain worker")
            terminal.press(b"y")
            terminal.wait_for("no living workers")
            terminal.press(b"q")

            assert terminal.process.wait(PATIENCE_S) == 0
        assert worker.wait() == 0


class TestGivenNoTerminal:
    @pytest.mark.slow
    def test_when_it_is_asked_for_then_it_prints_once(self, valkey: RedisServer) -> None:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "sluice.worker", "top", "--redis-url", valkey.url],
            cwd=ROOT, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip

        assert "queue default" in done.stdout
        assert "no living workers" in done.stdout
        assert "\x1b" not in done.stdout
