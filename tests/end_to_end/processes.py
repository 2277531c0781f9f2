"""Worker processes for tests, killed by signals: started by the command, or forks that run the same."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import psutil

from tests.forks import ROOT, Fork, Process

START_TIMEOUT_S = 60.0

FAST = {
    "SLUICE_MODEL": "null?step_s=0.01",
    "SLUICE_RECORDER": "false",
    "SLUICE_METRICS": "false",
    "SLUICE_BEAT_EVERY_S": "0.25",
    "SLUICE_BEAT_LIFE_S": "1",
    "SLUICE_LOG_FORMAT": "json",
    # `make test-engine-process` runs these tests with the engine in a process of its own.
    "SLUICE_ENGINE_PROCESS": os.environ.get("TEST_ENGINE_PROCESS", "auto"),
}


class WorkerProcess:
    """One `python -m sluice.worker start`: the parent process. Changes: it is stopped, continued, killed."""

    PREFIX: ClassVar[tuple[str, ...]] = ()
    """A command that runs it."""

    COMMAND: ClassVar[tuple[str, ...]] = ("start",)
    """The command of `worker`, with its flags."""

    def __init__(self, url: str, log: Path, **settings: str) -> None:
        own = {name for name in os.environ if name.startswith("SLUICE_")}
        environ = {name: value for name, value in os.environ.items() if name not in own}
        self.log = log
        command = ("sluice.worker", *self.COMMAND, "--redis-url", url)
        self.process = self._start(command, {**environ, **FAST, **settings, "OMP_NUM_THREADS": "1"})

    def _start(self, command: Sequence[str], environ: Mapping[str, str]) -> Process:
        whole = [*self.PREFIX, sys.executable, "-P", "-m", *command]
        with self.log.open("ab") as stream:
            return subprocess.Popen(whole, cwd=ROOT, env=environ, stderr=stream, stdout=stream)

    def wait_until_started(self) -> None:
        """Wait until its log has these words."""
        self.wait_for_line("worker started")

    def wait_for_line(self, words: str) -> None:
        """Until its log has these words."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while words not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline_s, self.output
            time.sleep(0.005)

    @property
    def output(self) -> str:
        """Its log so far."""
        return self.log.read_text()

    def outages(self) -> tuple[int, int]:
        """Number of outages of Redis that its log begins, and ends."""
        return self.output.count("redis unreachable"), self.output.count("redis reachable again")

    @property
    def incarnation(self) -> str:
        """The beginning of its incarnation, from its log."""
        found = re.search(r'"worker_id": "(\w+)"', self.output)
        assert found is not None
        return found[1]

    @property
    def parent_pid(self) -> int:
        """The parent process."""
        return self.process.pid

    @property
    def pid(self) -> int:
        """The process that works, the last one that its parent started; wait until it has started."""
        return self.pids_of("worker")[-1]

    def pids_of(self, kind: str) -> list[int]:
        """Processes of a kind, the oldest first."""
        children = psutil.Process(self.parent_pid).children()
        word = "record" if kind == "recorder" else "--incarnation"
        # The command line of a fork is another's.
        found = [one for one in children if word in one.cmdline() or one.name() == f"sluice-{kind}"]
        return [one.pid for one in sorted(found, key=lambda one: one.create_time())]

    def signal_worker(self, number: signal.Signals) -> None:
        """Send a signal to the process that works, which its parent does not see."""
        os.kill(self.pid, number)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the parent, as a supervisor does."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end, and give its exit code."""
        return self.process.wait(START_TIMEOUT_S)

    def kill(self) -> None:
        """End the whole group, as the end of a container does."""
        group = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        for process in (self.process, *group):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


class ForkedWorker(WorkerProcess):
    """The same as a fork, for tests that need a worker, and not its command line or what it imports."""

    def _start(self, command: Sequence[str], environ: Mapping[str, str]) -> Process:
        return Fork(command, environ, self.log)


class WorkerPool:
    """Starts workers and kills whatever is left of them."""

    def __init__(self, url: str, folder: Path, kind: type[WorkerProcess]) -> None:
        self._url = url
        self._folder = folder
        self._kind = kind
        self._workers: list[WorkerProcess] = []

    def start(self, **settings: str) -> WorkerProcess:
        """Start one, without waiting for it; settings by their environment names without prefix."""
        log = self._folder / f"worker-{len(self._workers)}.log"
        worker = self._kind(self._url, log, **{f"SLUICE_{name}": value for name, value in settings.items()})
        self._workers.append(worker)
        return worker

    def start_all(self, count: int, **settings: str) -> list[WorkerProcess]:
        """Start several, and wait for all."""
        workers = [self.start(**settings) for _ in range(count)]
        for worker in workers:
            worker.wait_until_started()
        return workers

    def drain(self) -> None:
        """Send SIGTERM to all, and wait for their ends."""
        for worker in self._workers:
            worker.signal(signal.SIGTERM)
        for worker in self._workers:
            worker.wait()

    def end(self) -> None:
        """Kill all."""
        for worker in self._workers:
            worker.kill()


@contextmanager
def worker_pool(url: str, folder: Path, kind: type[WorkerProcess] = ForkedWorker) -> Generator[WorkerPool]:
    """Workers that do not outlive the test."""
    made = WorkerPool(url, folder, kind)
    try:
        yield made
    finally:
        made.end()
