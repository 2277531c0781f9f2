"""One child process of `worker start`: a worker or a sidecar. It is started, restarted if it dies, and stopped."""

import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from signal import SIGTERM
from subprocess import Popen, TimeoutExpired
from typing import Literal

from sluice.protocol.redis.backoff import Backoff
from sluice.worker.clock import monotonic_s
from sluice.worker.errors import ExitCode
from sluice.worker.log import Log
from sluice.worker.processes.cores import on_cores
from sluice.worker.processes.prepared import ForkedProcess, PreparedProcess
from sluice.worker.signals import block_startup_signals
from sluice.worker.stopping import FINISH_S, FLUSH_S

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
STEADY_S = 60.0
"""A process that ran for this long resets its restart backoff."""

STOP_TIMEOUT_S = FINISH_S + FLUSH_S + 5.0
"""A recorder may use both of its limits, and needs some time to end."""


OnEnd = Callable[[str, bool], object]
"""Is told the incarnation of a process that has ended, and whether it was ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to run one child process."""

    kind: Literal["worker", "recorder", "callbacks"]
    """A worker is given a fresh incarnation at each start."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    name: str = ""
    """Its name in log lines. Empty for the only worker, whose lines need none."""

    restart: Literal["no", "on-failure", "always"] = "on-failure"
    """When to restart it. A child that exits with `MISUSED` is never restarted."""

    cores: frozenset[int] = frozenset()
    """Cores to pin it to. Empty means any."""

    arguments: tuple[str, ...] = ()
    """Arguments of the command `worker` for a fork, with the same effect as `command`."""

    def restarts_after(self, code: int) -> bool:
        """Return whether to restart it after an unexpected exit code."""
        if self.restart == "no" or code == ExitCode.MISUSED:
            return False
        return self.restart == "always" or code != ExitCode.DONE


class ChildProcess:
    """One child process and its restarts. Changes as processes start and end.

    Its standard input is a socket of the parent. A child ends when its input does, so it ends even if the parent is
    killed; and a worker writes a byte into it when it is ready.
    """

    def __init__(
        self,
        spec: ChildSpec,
        log: Log,
        on_end: OnEnd = lambda _incarnation, _was_ready: None,
        prepared: PreparedProcess | None = None,
    ) -> None:
        """Start nothing yet. `on_end` is called for each process that has ended; `prepared` forks it, if it can."""
        self._spec = spec
        self._log = log.bind(name=spec.name) if spec.name else log
        self._on_end = on_end
        self._prepared = prepared
        self._process: Popen[bytes] | ForkedProcess | None = None
        self._socket: socket.socket | None = None
        self._has_loaded = False
        self._was_ready = False
        self._is_leaving = False
        self._dies_often = False
        self._incarnation = ""
        self._began_s = 0.0
        self._backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        self.due_s: float | None = 0.0
        """When to start the next process; None while one runs or if none will follow."""

        self.last_code = 0
        """Exit code of the last process."""

        self.num_failed_starts = 0
        """Number of processes that ended before they were ready."""

    @property
    def is_needed(self) -> bool:
        """Whether a process runs or will be started."""
        return self._process is not None or self.due_s is not None

    @property
    def is_active(self) -> bool:
        """Whether it is needed, and not about to leave."""
        return self.is_needed and not self._is_leaving

    @property
    def is_refused(self) -> bool:
        """Whether the last process ended because its settings are wrong, so that none follows."""
        return not self.is_needed and self.last_code == ExitCode.MISUSED

    @property
    def pid(self) -> int | None:
        """Process id, if one runs that has not been waited for."""
        return None if self._process is None else self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether the first process has finished loading, or a later one runs."""
        if not self._has_loaded and self._socket is not None:
            with suppress(BlockingIOError, ConnectionError):
                self._has_loaded = self._socket.recv(1) != b""
        self._was_ready = self._was_ready or self._has_loaded
        return self._was_ready

    @property
    def is_loaded(self) -> bool:
        """Whether the process that runs now is ready."""
        return self.is_ready and self._process is not None and self._has_loaded

    def start_if_due(self) -> None:
        """Start the next process if it is due."""
        if self.due_s is None or monotonic_s() < self.due_s:
            return
        self.due_s, self._began_s, self._incarnation = None, monotonic_s(), uuid.uuid4().hex
        self._has_loaded = False
        given = ("--incarnation", self._incarnation) if self._spec.kind == "worker" else ()
        try:
            self._process = self._spawn(given)
        except OSError as error:  # out of memory or processes
            self._close_input()
            self._schedule_restart(f"{self._spec.kind} process cannot be started; retrying", error=str(error))
            return
        # The only worker reports its start itself.
        log = self._log.debug if self._spec.restart == "no" else self._log.info
        log(f"{self._spec.kind} process started", pid=self._process.pid)

    def _spawn(self, given: Sequence[str]) -> Popen[bytes] | ForkedProcess:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        spec, stdin = self._spec, theirs.fileno()
        with theirs:
            if self._prepared is not None:
                with suppress(OSError):
                    return self._prepared.fork([*spec.arguments, *given], spec.environ, sorted(spec.cores), stdin)
            with on_cores(spec.cores), block_startup_signals():
                # A new session, because Ctrl-C is for the parent, which forwards it once.
                return Popen([*spec.command, *given], stdin=stdin, env=dict(spec.environ), start_new_session=True)

    def look(self, *, is_stopping: bool) -> None:
        """Check whether the process has ended, and schedule a restart unless it ended for good."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        _ = self.is_ready  # it may have said so since the last look
        self._close_input()
        self._process, self.last_code = None, code
        self.num_failed_starts += not self._has_loaded
        self._on_end(self._incarnation, self._has_loaded)
        kind = self._spec.kind
        is_asked, self._is_leaving = is_stopping or self._is_leaving, False
        if not is_asked and self._spec.restarts_after(code):
            self._schedule_restart(f"{kind} process died; restarting", exit_code=code)
        elif code < 0 and not is_asked:
            self._log.warning(f"{kind} process died", exit_code=code)
        elif self._spec.restart == "no":
            self._log.debug(f"{kind} process ended", exit_code=code)  # it has logged why
        elif code == ExitCode.MISUSED:
            self._log.error(f"{kind} process cannot run; it will not be restarted", exit_code=code)
        else:
            self._log.info(f"{kind} process ended", exit_code=code)

    def _schedule_restart(self, event: str, **why: object) -> None:
        now_s = monotonic_s()
        if now_s - self._began_s >= STEADY_S:
            self._backoff.reset()
            self._dies_often = False
        # A process that has served did not die of its settings: the first time it is replaced at once.
        is_first, self._dies_often = not self._dies_often, True
        delay_s = 0.0 if self._has_loaded and is_first else self._backoff.next_delay_s()
        self._log.warning(event, **why, retry_in_s=delay_s)
        self.due_s = now_s + delay_s

    def signal(self, number: int) -> None:
        """Send a signal to the process, if one runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def enlist(self) -> None:
        """Start a process, unless one runs or is due."""
        if not self.is_needed:
            self.due_s = 0.0

    def dismiss(self) -> None:
        """Ask the process to end for good, as SIGTERM does; `enlist` starts another once it has."""
        self.retire()
        if self._process is not None:
            self._is_leaving = True
            self._process.send_signal(SIGTERM)

    def retire(self) -> None:
        """Start no further process. If one was due, no jobs are held, so this counts as a clean end."""
        if self.due_s is not None:
            self.due_s, self.last_code = None, 0

    def stop(self) -> None:
        """End the process: close its input, wait for its end, and kill it after a timeout."""
        self.due_s = None
        if self._process is None:
            return
        self._close_input()
        try:
            self.last_code = self._process.wait(STOP_TIMEOUT_S)
        except TimeoutExpired:
            self._log.warning(f"{self._spec.kind} process did not stop in time", pid=self._process.pid)
            self._process.kill()
            self.last_code = self._process.wait()
        self._process = None

    def _close_input(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
