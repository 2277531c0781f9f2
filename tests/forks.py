"""Commands of this project as forks of one process that has imported everything.

The interpreter and its imports take a second of processor time each start; a fork takes a tenth of it. It runs the same
module with the same environment, and dies as any other process does. Tests of a command line, or of what is imported
when, start real processes instead.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from sluice.worker.processes import child_process
from sluice.worker.processes.parent import PASSED_ON
from sluice.worker.processes.prepared import ForkedProcess
from sluice.worker.serve.forks import NAME

ROOT = Path(__file__).parent.parent
NAMES = {"start": NAME, "record": "sluice-recorder", "callbacks": "sluice-callback"}
"""The names of child processes by their command. Their command line is that of the process that forks."""

PRELOADED = [
    "sluice.engine.null_model",
    "sluice.gateway.cli.serve",
    "sluice.gateway.server",
    "sluice.producer.cli.main",
    "sluice.producer.client",
    "sluice.worker.callbacks.command",
    "sluice.worker.model.load",
    "sluice.worker.processes.death_report",
    "sluice.worker.processes.parent",
    "sluice.worker.recorder.recorder",
    "sluice.worker.serve.start",
    "tests.chaos.catalogue",
]

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(PRELOADED)


@dataclass(frozen=True, slots=True)
class _Streams:
    """The files that get a fork's output, at their ends, and the folder that it runs in."""

    out: str
    err: str
    folder: str = str(ROOT)


def fork(
    command: Sequence[str], environ: Mapping[str, str], log: Path, name: str, *, daemon: bool
) -> ForkServerProcess:
    """Run `python -m <command>` in a fork, whose child processes are forks too; its output goes to the end of a file.

    A daemonic process ends with this one, but cannot use multiprocessing.
    """
    log.touch()
    streams = _Streams(str(log), str(log))
    process = _forks.Process(target=_run, args=(tuple(command), dict(environ), streams), name=name, daemon=daemon)
    process.start()
    return process


def run(
    command: Sequence[str], environ: Mapping[str, str], folder: Path, *, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run `python -m <command>`, or the file `<command>` if it ends in `.py`, in a fork and in a folder, to its end."""
    with TemporaryDirectory() as logs:
        out, err = Path(logs, "out"), Path(logs, "err")
        streams = _Streams(str(out), str(err), str(folder))
        process = _forks.Process(target=_run, args=(tuple(command), dict(environ), streams), name=command[0])
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(command), timeout_s)
        return subprocess.CompletedProcess(list(command), process.exitcode, out.read_text(), err.read_text())


class Fork:
    """In place of the `Popen` of `python -m <command>`. Changes once it has ended."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._process = fork(command, environ, log, command[0], daemon=False)
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """See `Popen`."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """See `Popen`."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """See `Popen`."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """See `Popen`."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """See `Popen`."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See `Popen`."""
        self.send_signal(signal.SIGKILL)


Process = Fork | subprocess.Popen[bytes]


def start(command: Sequence[str], environ: Mapping[str, str], log: Path, *, is_fork: bool) -> Process:
    """Run `python -m <command>`, in a fork or as its user does; its output goes to the end of a file."""
    if is_fork:
        return Fork(command, environ, log)
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", *command], cwd=ROOT, env=dict(environ), stdout=stream, stderr=stream
        )


def _fork_child(command: Sequence[str], *, stdin: int, env: dict[str, str], **_options: object) -> ForkedProcess:
    """Run the module of a command in a fork of `worker start`, in place of its `Popen`."""
    # A fork while one of the parent's threads runs would inherit whatever locks it holds.
    for thread in threading.enumerate():
        if thread.name in ("kernels", "death-report"):
            thread.join()
    module = command[command.index("-m") + 1 :]
    pid = os.fork()
    if pid:
        return ForkedProcess(pid)
    os.setsid()
    Path("/proc/self/comm").write_text(NAMES[module[1]])
    os.dup2(stdin, 0)
    # Else it would hold the parent's end of its own input.
    os.closerange(3, 256)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # it stays open
    signal.set_wakeup_fd(-1)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    os._exit(_code_of(module, env))


def _code_of(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `python -m <command>` in this process; return its exit code."""
    try:
        _run_module(command, environ)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def _run(command: Sequence[str], environ: Mapping[str, str], streams: _Streams) -> None:
    for number, file in ((1, streams.out), (2, streams.err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), number)
    setattr(child_process, "Popen", _fork_child)  # noqa: B010  # no hook is in the code under test
    _run_module(command, environ, streams.folder)


def _run_module(command: Sequence[str], environ: Mapping[str, str], folder: str = str(ROOT)) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = list(command)
    if command[0].endswith(".py"):
        runpy.run_path(command[0], run_name="__main__")
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
