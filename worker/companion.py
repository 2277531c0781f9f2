"""The recorder process beside the worker: started with it, started again if it dies, stopped after it."""

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from worker.errors import ExitCode
from worker.log import Log

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
STOP_TIMEOUT_S = 10.0


class Companion:
    """One child process that outlives neither its usefulness nor its parent. A part: start, quiet, stop.

    The child reads its standard input and ends when that does, so it goes even when the parent is killed; it then has
    written what was in the outbox.
    """

    def __init__(self, name: str, arguments: Sequence[str], environ: Mapping[str, str], log: Log) -> None:
        self._name = name
        self._command = [sys.executable, "-m", "worker", *arguments]
        self._environ = dict(environ)
        self._log = log
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Held while a process is started, and while it is decided that none will be any more."""

        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def start(self) -> None:
        """Start the process and watch it."""
        self._spawn()
        self._thread.start()

    def quiet(self) -> None:
        """Nothing to do: what is published now is still to be recorded."""

    def stop(self) -> None:
        """Let it finish what it has, and end it."""
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
        # A group of its own: Ctrl-C is for the worker, which stops its companion last.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, env=self._environ, start_new_session=True
        )

    def _watch(self) -> None:
        delay_s = FIRST_DELAY_S
        while (process := self._process) is not None:
            code = process.wait()
            if self._closing.is_set():
                return
            _close_input(process)
            if code == ExitCode.MISUSED:
                self._log.error(f"{self._name} cannot run; the outbox keeps its rows", exit_code=code)
                return
            self._log.warning(f"{self._name} ended; starting it again", exit_code=code, retry_in_s=delay_s)
            delay_s = self._spawn_again(delay_s)

    def _spawn_again(self, delay_s: float) -> float:
        """Start the process after `delay_s`, and again after longer ones while the system refuses; return the next."""
        while not self._closing.wait(delay_s):
            delay_s = min(delay_s * 2, MAX_DELAY_S)
            try:
                with self._lock:
                    if not self._closing.is_set():
                        self._spawn()
            except OSError as error:
                self._log.warning(f"{self._name} cannot be started", error=str(error), retry_in_s=delay_s)
            else:
                break
        return delay_s


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
