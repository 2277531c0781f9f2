"""The process of an engine, as the worker starts, loads and ends it."""

import os
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from signal import SIGUSR1
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Self

from sluice.version import installed_version
from sluice.worker.config import WorkerConfig
from sluice.worker.engine_process.messages import Load, LoadFailed, Setup, StepReport, receive, send
from sluice.worker.errors import ConfigError, WorkerBroken
from sluice.worker.model.loaded_model import EngineFacts
from sluice.worker.signals import block_startup_signals

_ARGUMENTS = ("-P", "-m", "sluice.worker.engine_process")
STOP_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 5.0
"""A process in a driver's call may outlast even a SIGKILL."""


class EngineProcess:
    """A process that loads a model and runs its engine. Use as a context manager: it ends with the context."""

    def __init__(self, config: WorkerConfig, worker_id: str) -> None:
        """Start it. It imports the modules for the model, and waits for `load`."""
        self._socket, theirs = socket.socketpair()
        self.connection = Connection(os.dup(self._socket.fileno()))
        self._is_loaded = False
        self._load_deadline_s = config.beat.load_deadline_s
        with theirs, block_startup_signals():
            # A new session, because Ctrl-C is for the worker.
            python = config.model.engine_python or sys.executable
            self._process = Popen(
                [python, *_ARGUMENTS, str(theirs.fileno()), str(os.getpid()), installed_version()],
                stdin=DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        send(self.connection, Setup(config, worker_id))

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the process."""
        self.stop()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def load(self) -> tuple[EngineFacts, StepReport]:
        """Let it load the model; wait until it has, and for its first report.

        Raises:
            ConfigError: the settings or the model's files are wrong.
            WorkerBroken: the model cannot be loaded now, the process ended, or it did not load in time.
        """
        try:
            with suppress(OSError):  # it has ended, perhaps after an answer
                send(self.connection, Load())
            if not self.connection.poll(self._load_deadline_s):
                raise WorkerBroken(
                    f"the engine's process has not loaded the model for {self._load_deadline_s:g} s "
                    "(SLUICE_LOAD_DEADLINE_S)"
                )
            answer = receive(self.connection, EngineFacts, LoadFailed)
            if isinstance(answer, LoadFailed):
                raise ConfigError(answer.problems) if answer.are_settings else WorkerBroken(*answer.problems)
            report = receive(self.connection, StepReport)
        except EOFError:
            raise WorkerBroken(f"the engine's process ended while it loaded the model: {self.end()}") from None
        self._is_loaded = True
        return answer, report

    def describe(self) -> None:
        """Let it log its sequences."""
        self._process.send_signal(SIGUSR1)

    def end(self) -> str:
        """Wait for its end, which has come or is near, and say how it ended."""
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except TimeoutExpired:
            return "it closed its socket"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    def stop(self) -> None:
        """End it: close the socket, and kill it after a timeout. What loads a model has nothing to end in order."""
        with suppress(OSError):
            # Closing alone would not wake a thread that reads from it.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._is_loaded:
            with suppress(TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self._process.kill()
        with suppress(TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)
