"""`worker start`: the parent process of one worker or several, and of their sidecars.

It starts them, forwards signals, and reports each worker that has ended to the queue, so that other workers take its
jobs over at once. It restarts the sidecars (the recorder, and callbacks), and the workers of a fleet. It ends when all
workers have ended. It loads no model and uses no device. If it dies, its children shut down gracefully.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from sluice.kernels.native import build_ahead
from sluice.worker.clock import monotonic_s
from sluice.worker.config import WorkerConfig
from sluice.worker.endpoints import RedisEndpoint, find_redis, partitions_of
from sluice.worker.errors import ExitCode
from sluice.worker.log import Log, configure_logs, ended_by_threads, get_log
from sluice.worker.model.folders import is_null
from sluice.worker.processes.child_process import ChildProcess, ChildSpec, OnEnd
from sluice.worker.processes.prepared import PreparedProcess
from sluice.worker.processes.specs import prepared_process, sidecar_specs, worker_specs
from sluice.worker.signals import handling

LOOK_EVERY_S = 1.0
"""Interval of polls for workers that are ready, and for ended processes, which SIGCHLD reports at once."""

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP, signal.SIGCONT, signal.SIGUSR1)

Report = OnEnd
"""Reports the death of an incarnation."""


def start_parent(config: WorkerConfig, environ: Mapping[str, str]) -> int:
    """Run the workers of a configuration until all have ended; return the exit code.

    Raises:
        ConfigError: the device is `cuda:all` and there is no GPU, or no server can be started on this host.
    """
    configure_logs(config.log)
    log = get_log()
    workers, sidecars = worker_specs(config, environ), sidecar_specs(config, environ)
    redis = server_of_children(config, environ, log)
    build_kernels_ahead(config)
    with ended_by_threads(log):
        report = reporter(redis.url, config, log)
        return Parent(workers, sidecars, log, report, prepared_process(config, environ, log)).run()


def build_kernels_ahead(config: WorkerConfig) -> None:
    """Build the kernels of a CPU in the background, if they are not built yet, while the workers import torch."""
    if config.model.device == "cpu" and not is_null(config.model):
        # A daemon: a worker that ends before has no use for them.
        threading.Thread(target=build_ahead, name="kernels", daemon=True).start()


def server_of_children(config: WorkerConfig, environ: Mapping[str, str], log: Log) -> RedisEndpoint:
    """Find or start the server of the children, before they look for it. Keep it as long as they run.

    Raises:
        ConfigError: no server can be started on this host.
    """
    with ending_at_once():
        redis = find_redis(config, environ)
    if redis.embedded is not None and redis.embedded.has_started:
        log.info("embedded server started; it stops with its last user", url=redis.url)
    return redis


def reporter(url: str, config: WorkerConfig, log: Log) -> Callable[[], Report]:
    """Return a function that makes the one that reports deaths to the queue."""

    def make_report() -> Report:
        from sluice.worker.processes.death_report import DeathReports

        return DeathReports(url, partitions_of(config), log).send

    return make_report


class Parent:
    """The parent of worker processes and their sidecars. Changes as they start and end."""

    def __init__(
        self,
        workers: Sequence[ChildSpec],
        sidecars: Sequence[ChildSpec],
        log: Log,
        make_report: Callable[[], Report] = lambda: lambda _incarnation, _was_ready: None,
        prepared: PreparedProcess | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            workers: The workers to run. The parent ends when the last one has ended for good.
            sidecars: Processes that run alongside and are stopped after them.
            log: Where to log.
            make_report: Makes the function that reports deaths. Called once the children start, because it imports
                modules while they load.
            prepared: Forks the workers, if there is such a process.
        """
        self._prepared = prepared
        self._workers = [ChildProcess(spec, log, self._report_death, prepared) for spec in workers]
        self._sidecars = [ChildProcess(spec, log) for spec in sidecars]
        self._is_alone = len(workers) == 1 and workers[0].restart == "no"
        self._make_report = make_report
        self._report: Report | None = None
        # The interpreter writes the number of each signal into this pipe at once, so that none is noticed late.
        self._signals_read, self._signals_written = os.pipe()
        os.set_blocking(self._signals_written, False)
        self._is_quiet = False
        self._is_stopping = False

    def run(self) -> int:
        """Keep the processes running until asked to stop or until no worker can be restarted; return the exit code."""
        with self._signals():
            while self._is_needed:
                self._steer()
                self._start_due()
                if self._report is None:
                    self._report = self._make_report()
                self._listen()
                self._look()
                self._reap_orphans()
            if self._prepared is not None:
                self._prepared.stop()
            for sidecar in self._sidecars:
                sidecar.stop()
        return self._exit_code()

    @property
    def _is_needed(self) -> bool:
        """Whether a worker runs or will be started."""
        return any(worker.is_needed for worker in self._workers)

    def _steer(self) -> None:
        """Decide which workers should run; here all of them, from the start."""

    @property
    def _startable(self) -> tuple[ChildProcess, ...]:
        """Children that may be started now: workers while they may pull, sidecars once a worker has loaded."""
        is_ready = any(worker.is_ready for worker in self._workers)
        waits = self._is_quiet or (self._prepared is not None and self._prepared.is_awaited)
        return (*(() if waits else self._workers), *(self._sidecars if is_ready else ()))

    def _start_due(self) -> None:
        if self._prepared is not None and not self._is_stopping:
            self._prepared.start_if_due()
        for child in self._startable:
            child.start_if_due()

    def _look(self) -> None:
        if self._prepared is not None:
            self._prepared.look()
        for child in (*self._workers, *self._sidecars):
            child.look(is_stopping=self._is_stopping)

    def _report_death(self, incarnation: str, was_ready: bool) -> None:
        if self._report is not None:
            self._report(incarnation, was_ready)

    def _listen(self) -> None:
        """Wait for a signal until a restart is due, and forward it."""
        due = [child.due_s for child in self._startable if child.due_s is not None]
        wait_s = min([self._look_every_s, *(due_s - monotonic_s() for due_s in due)])
        others = () if self._prepared is None else self._prepared.listened_to
        has_come, _, _ = select.select([self._signals_read, *others], [], [], max(0.0, wait_s))
        for number in os.read(self._signals_read, 4096) if self._signals_read in has_come else b"":
            if number in PASSED_ON:
                self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            # To a worker, SIGTERM counts once and SIGINT each time. SIGINT would end a process that is still loading
            # with the exit code for broken, so it is not the first.
            number = signal.SIGINT if self._is_stopping else signal.SIGTERM
            self._is_stopping = True
            for worker in self._workers:
                worker.retire()
        elif number in (signal.SIGTSTP, signal.SIGCONT):
            self._is_quiet = number == signal.SIGTSTP
        for worker in self._workers:
            worker.signal(number)

    @property
    def _look_every_s(self) -> float:
        return LOOK_EVERY_S

    def _reap_orphans(self) -> None:
        """Reap ended processes of others: as process 1 of a container, this one inherits them."""
        own = {child.pid for child in (*self._workers, *self._sidecars)}
        if self._prepared is not None:
            own.add(self._prepared.pid)
        try:
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
                os.waitpid(ended.si_pid, 0)
        except ChildProcessError:
            return

    def _exit_code(self) -> int:
        codes = {worker.last_code for worker in self._workers}
        # A process that was stopped before it handled SIGTERM held no jobs.
        if codes <= {ExitCode.DONE, -signal.SIGTERM if self._is_stopping else ExitCode.DONE}:
            return ExitCode.DONE
        if self._is_alone:
            (code,) = codes
            return code if code >= 0 else 128 - code
        return ExitCode.MISUSED if ExitCode.MISUSED in codes else ExitCode.BROKEN

    @contextmanager
    def _signals(self) -> Generator[None]:
        before_fd = signal.set_wakeup_fd(self._signals_written)
        try:
            with handling(dict.fromkeys((*PASSED_ON, signal.SIGCHLD), _ignore)):
                yield
        finally:
            signal.set_wakeup_fd(before_fd)


def ending_at_once() -> AbstractContextManager[None]:
    """End the process at SIGTERM: process 1 of a container ignores it as long as it has no handler."""
    return handling({signal.SIGTERM: lambda _number, _frame: sys.exit(ExitCode.DONE)})


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal that is read from the pipe."""
