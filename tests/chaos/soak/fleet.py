"""Processes that are started again whenever they end, as a supervisor would.

A thousand starts would cost more than all else, so each is a fork.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from sluice.worker.serve.forks import NAME
from tests.forks import fork

STOP_TIMEOUT_S = 60.0
SHORTEST_LIFE_S = 0.2
"""Backoff for a process that cannot start."""

Command = Callable[[int], Sequence[str]]
"""Module and arguments, given the number of earlier starts."""


class Supervised:
    """A process that is restarted whenever it ends. Mutable."""

    def __init__(
        self, name: str, command: Command, log: Path, settings: dict[str, str], *, has_children: bool = False
    ) -> None:
        self.name = name
        self.num_starts = 0
        self._command = command
        self._log = log
        own = {one: value for one, value in os.environ.items() if not one.startswith("SLUICE_")}
        self._environ = {**own, **settings, "OMP_NUM_THREADS": "1"}
        self._is_over = False
        self._has_children = has_children
        self.process = self._spawn()
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
        self._thread.start()

    def _spawn(self) -> ForkServerProcess:
        command = self._command(self.num_starts)
        self.num_starts += 1
        return fork(command, self._environ, self._log, self.name, daemon=not self._has_children)

    def _keep(self) -> None:
        while True:
            began_s = time.monotonic()
            self.process.join()
            if self._is_over:
                return
            time.sleep(max(0.0, SHORTEST_LIFE_S - (time.monotonic() - began_s)))
            self.process = self._spawn()

    @property
    def pid(self) -> int:
        """The process id of the current process, or of the last one."""
        return self.process.pid or 0

    @property
    def worker_pid(self) -> int | None:
        """The process id of the worker whose parent this process is, if there is one."""
        try:
            children = psutil.Process(self.pid).children() if self.process.is_alive() else []
            # Others are its recorder and the process that forks workers. The command line of a fork is another's.
            workers = [one.pid for one in children if one.name() == NAME or "--incarnation" in one.cmdline()]
        except psutil.NoSuchProcess:
            return None
        return workers[0] if workers else None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the current process.

        Raises:
            ProcessLookupError: there is none.
        """
        if not self.process.is_alive():
            raise ProcessLookupError(self.name)
        os.kill(self.pid, number)

    def retire(self) -> None:
        """Ask it to stop, without a restart."""
        self._is_over = True
        for number in (signal.SIGCONT, signal.SIGTERM):
            try:
                self.signal(number)
            except ProcessLookupError:
                return

    def join(self) -> None:
        """Wait until it has stopped; kill it if it does not."""
        self._thread.join(STOP_TIMEOUT_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Fleet:
    """Processes of one kind."""

    def __init__(self, members: Sequence[Supervised]) -> None:
        self.members = members

    def by_worker_pid(self) -> dict[int, Supervised]:
        """The members that have a worker, by its process id."""
        return {pid: member for member in self.members if (pid := member.worker_pid) is not None}

    def stop(self) -> None:
        """Drain all, without restarts. Idempotent."""
        for member in self.members:
            member.retire()
        for member in self.members:
            member.join()


@contextmanager
def fleet(
    name: str, commands: Sequence[Command], folder: Path, has_children: bool = False, /, **settings: str
) -> Generator[Fleet]:
    """Run processes for the time of a soak; settings by their environment names without prefix."""
    environ = {f"SLUICE_{one}": value for one, value in settings.items()}
    members = [
        Supervised(f"{name}-{i}", command, folder / f"{name}-{i}.log", environ, has_children=has_children)
        for i, command in enumerate(commands)
    ]
    made = Fleet(members)
    try:
        yield made
    finally:
        made.stop()
