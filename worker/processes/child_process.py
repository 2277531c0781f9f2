"""A child process of the worker, such as the recorder: started with it, restarted if it dies, stopped after it."""

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from sluice.producer.contract.transport.backoff import Backoff
from sluice.worker.errors import ExitCode
from sluice.worker.log import Log

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
STOP_TIMEOUT_S = 10.0


class ChildProcess:
    """One supervised child process.

    The child ends when its standard input does, so it ends even if the parent is killed. The recorder drains the outbox
    before it ends.
    """

    def __init__(self, name: str, arguments: Sequence[str], environ: Mapping[str, str], log: Log) -> None:
        self._name = name
        self._command = [sys.executable, "-P", "-m", "sluice.worker", *arguments]
        self._environ = dict(environ)
        self._log = log
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Held while a process is started and while `stop` ends restarts."""

        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def start(self) -> None:
        """Start the process and watch it."""
        self._spawn()
        self._thread.start()

    def stop(self) -> None:
        """Close the child's input, wait for its end, and kill it after a timeout."""
        with self._lock:
            self._closing.set()
            process, self._process = self._process, None
        if process is None:
            return
        _close_input(process)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._log.warning(f"{self._name} did not stop in time", pid=process.pid)
            process.kill()
            process.wait()
        if self._thread.ident is not None:
            self._thread.join()

    def _spawn(self) -> None:
        # A new session, because Ctrl-C is for the worker, which stops its child process last.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, env=self._environ, start_new_session=True
        )

    def _watch(self) -> None:
        backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        while (process := self._process) is not None:
            code = process.wait()
            if self._closing.is_set():
                return
            _close_input(process)
            if code == ExitCode.MISUSED:
                self._log.error(f"{self._name} cannot run; the outbox keeps its rows", exit_code=code)
                return
            delay_s = backoff.next_delay_s()
            self._log.warning(f"{self._name} ended; restarting", exit_code=code, retry_in_s=delay_s)
            self._restart(delay_s, backoff)

    def _restart(self, delay_s: float, backoff: Backoff) -> None:
        """Start the process after `delay_s`, and retry with backoff while the system refuses."""
        while not self._closing.wait(delay_s):
            try:
                with self._lock:
                    if not self._closing.is_set():
                        self._spawn()
            except OSError as error:
                delay_s = backoff.next_delay_s()
                self._log.warning(f"{self._name} cannot be started", error=str(error), retry_in_s=delay_s)
            else:
                return


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
