"""The process of an engine, as the worker starts, loads and ends it."""

import os
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from subprocess import Popen, TimeoutExpired
from typing import Self

from sluice.worker.config import WorkerConfig
from sluice.worker.engine_process.messages import Load, LoadFailed, Setup, receive, send
from sluice.worker.errors import ConfigError, WorkerBroken
from sluice.worker.model.loaded_model import EngineFacts

_COMMAND = (sys.executable, "-P", "-m", "sluice.worker.engine_process.child")
STOP_TIMEOUT_S = 5.0


class EngineProcess:
    """A process that loads a model and runs its engine. Use as a context manager: it ends with the context."""

    def __init__(self, config: WorkerConfig) -> None:
        """Start it. It imports and checks what it needs for the model, and waits for `load`."""
        self._socket, theirs = socket.socketpair()
        self.connection = Connection(os.dup(self._socket.fileno()))
        with theirs:
            # A new session, because Ctrl-C is for the worker.
            self._process = Popen([*_COMMAND, str(theirs.fileno())], pass_fds=[theirs.fileno()], start_new_session=True)
        send(self.connection, Setup(config))

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

    def load(self) -> EngineFacts:
        """Let it load the model, and wait until it has.

        Raises:
            ConfigError: the settings or the model's files are wrong.
            WorkerBroken: the model cannot be loaded now, or the process ended.
        """
        try:
            send(self.connection, Load())
            answer = receive(self.connection, EngineFacts, LoadFailed)
        except (EOFError, OSError):
            raise WorkerBroken(f"the engine's process ended while it loaded the model: {self.end()}") from None
        if not isinstance(answer, LoadFailed):
            return answer
        raise ConfigError(answer.problems) if answer.are_settings else WorkerBroken(*answer.problems)

    def end(self) -> str:
        """Wait for its end, which has come or is near, and say how it ended."""
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except TimeoutExpired:
            return "it closed its socket"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    def stop(self) -> None:
        """End it: close the socket, and kill it after a timeout."""
        with suppress(OSError):
            # Closing alone would not wake a thread that reads from it.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()
