"""Processes that are started again whenever they end, as a supervisor would.

A thousand starts would cost more than all else, so each is forked from one process that has imported everything: it
runs the same command with the same settings, and dies as any other does.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from sluice.worker.processes import child_process
from sluice.worker.processes.parent import PASSED_ON
from tests.end_to_end.processes import FORK, ROOT

STOP_TIMEOUT_S = 60.0
SHORTEST_LIFE_S = 0.2
"""Backoff for a process that cannot start."""

PRELOADED = [
    "sluice.worker.serve.start",
    "sluice.worker.recorder.recorder",
    "sluice.worker.model.load",
    "sluice.worker.processes.death_report",
    "sluice.worker.processes.parent",
    "sluice.worker.processes.sidecars",
    "sluice.producer.client",
    "tests.chaos.catalogue",
]

Command = Callable[[int], Sequence[str]]
"""Module and arguments, given the number of earlier starts."""

_forks = multiprocessing.get_context("forkserver")


def preload(*modules: str) -> None:
    """Preload these modules in the fork server. Call it before the first process starts."""
    _forks.set_forkserver_preload([*PRELOADED, *modules])


class Forked:
    """In place of the `Popen` of `worker start`: a fork of the parent process that runs the same module."""

    def __init__(self, command: Sequence[str], *, stdin: int, env: dict[str, str], **_options: object) -> None:
        self.returncode: int | None = None
        # A fork while the parent's thread builds the kernels would inherit whatever locks it holds.
        for thread in threading.enumerate():
            if thread.name == "kernels":
                thread.join()
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        os.dup2(stdin, 0)
        # Else it would hold the parent's end of its own input.
        os.closerange(3, 256)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  # it stays open
        signal.set_wakeup_fd(-1)
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        os._exit(_code_of(command[command.index("-m") + 1 :], env))

    def poll(self) -> int | None:
        """See `Popen`."""
        if self.returncode is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        """See `Popen`."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _code_of(command: Sequence[str], environ: dict[str, str]) -> int:
    """Run `python -m <command>` in this process; return its exit code."""
    try:
        _run_module(command, environ)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def _run(command: Sequence[str], environ: dict[str, str], log: str) -> None:
    """Run `python -m <command>` in a fork, whose child processes are forks too."""
    stream = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    setattr(child_process, "Popen", Forked)  # noqa: B010  # no hook is in the code under test
    _run_module(command, environ)


def _run_module(command: Sequence[str], environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(ROOT)
    sys.argv = list(command)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


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
        arguments = (tuple(self._command(self.num_starts)), self._environ, str(self._log))
        # A daemonic process ends with its parent, but cannot start child processes.
        process = _forks.Process(target=_run, args=arguments, name=self.name, daemon=not self._has_children)
        self.num_starts += 1
        process.start()
        return process

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
            # One of them may be the process that forks the workers.
            workers = [one.pid for one in children if one.name() == FORK or "--forks" not in one.cmdline()]
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
