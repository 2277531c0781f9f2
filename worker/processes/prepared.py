"""A process that has imported what a worker needs, and forks workers: each begins without its seconds of imports.

It is the parent's child. It forks twice and ends the process between, so a worker becomes the child of the nearest
subreaper, the parent (`man 2 PR_SET_CHILD_SUBREAPER`), which waits for it as for one that it started itself. Android's
zygote is such a process.
"""

import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from subprocess import Popen, TimeoutExpired

from sluice.protocol.redis.backoff import Backoff
from sluice.worker.clock import monotonic_s
from sluice.worker.log import Log

PR_SET_CHILD_SUBREAPER = 36
READY = b"+"
MAX_REQUEST_BYTES = 128 * 1024
"""Arguments and environment of a worker. A larger one is started as any process."""

FORK_TIMEOUT_S = 5.0
PATIENCE_S = 60.0
"""Longest wait of the first workers for the imports."""

NO_WORKER = -1
"""The answer to a request for which the system had no process."""


class ForkedProcess:
    """A worker that was forked for this process, with the interface of `Popen`. Changes once it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            TimeoutExpired: it runs for longer.
        """
        until_s = None if timeout is None else monotonic_s() + timeout
        while (code := self.poll()) is None:
            if until_s is not None and monotonic_s() > until_s:
                raise TimeoutExpired("worker", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, if it runs."""
        self.send_signal(signal.SIGKILL)


class PreparedProcess:
    """The parent's side of the process that forks workers. Changes as that process starts, is ready, and ends."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Log) -> None:
        """Start nothing yet. `environ` is that of the workers, as far as libraries read it when they are loaded."""
        self._command = command
        # OpenBLAS, which a worker does not use, starts its threads when NumPy is imported; a fork would lack them.
        self._environ = {**environ, "OPENBLAS_NUM_THREADS": "1"}
        self._log = log
        self._process: Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False
        self._backoff = Backoff(1.0, 60.0)
        self._due_s = 0.0
        self._patient_until_s = monotonic_s() + PATIENCE_S

    @property
    def pid(self) -> int | None:
        """Process id, if one runs that has not been waited for."""
        return None if self._process is None else self._process.pid

    @property
    def is_awaited(self) -> bool:
        """Whether workers that are due should wait: it is about to be ready for the first time."""
        return not self._is_ready and self._process is not None and monotonic_s() < self._patient_until_s

    @property
    def listened_to(self) -> tuple[socket.socket, ...]:
        """A descriptor that becomes readable when it is ready, or has ended."""
        return () if self._socket is None else (self._socket,)

    def start_if_due(self) -> None:
        """Start the process, unless it runs or ended a moment ago."""
        if self._process is not None or monotonic_s() < self._due_s:
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            with theirs:
                self._process = Popen(
                    self._command, stdin=theirs.fileno(), env=dict(self._environ), start_new_session=True
                )
            become_subreaper()
        except OSError as error:  # out of memory or processes
            self._log.warning("process that forks workers cannot be started", error=str(error))
            self.stop()

    def look(self) -> None:
        """See whether it is ready, or has ended."""
        if self._socket is None:
            return
        try:
            said = self._socket.recv(1)
        except BlockingIOError:
            return
        except ConnectionError:  # it died with a request unread
            said = b""
        if said == READY:
            self._is_ready = True
            self._backoff.reset()
        else:
            self._log.warning("process that forks workers ended; they are started without it")
            self.stop()

    def fork(
        self, arguments: Sequence[str], environ: Mapping[str, str], cores: Sequence[int], stdin: int
    ) -> ForkedProcess:
        """Fork a worker.

        Args:
            arguments: Of the command `worker`.
            environ: Its environment.
            cores: Cores to pin it to. Empty means any.
            stdin: Its standard input.

        Raises:
            OSError: it is not ready, or cannot.
        """
        request = json.dumps([list(arguments), dict(environ), sorted(cores)]).encode()
        if self._socket is None or not self._is_ready or len(request) > MAX_REQUEST_BYTES:
            raise OSError("the process that forks workers is not running")
        try:
            self._socket.settimeout(FORK_TIMEOUT_S)
            socket.send_fds(self._socket, [request], [stdin])
            answer = self._socket.recv(64)
            self._socket.setblocking(False)
        except OSError:
            self.stop()
            raise
        if not answer or int(answer) == NO_WORKER:
            raise OSError("the process that forks workers cannot fork")
        return ForkedProcess(int(answer))

    def stop(self) -> None:
        """End the process. Workers that it forked stay; it may be started again after a pause."""
        self._is_ready = False
        self._due_s = monotonic_s() + self._backoff.next_delay_s()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def become_subreaper() -> None:
    """Become the parent of descendants whose own parents end.

    Raises:
        OSError: the system knows no subreapers.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
