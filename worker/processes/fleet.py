"""`worker start` with several worker processes on one host: one per GPU, or several on the CPU.

Each process is a complete worker with its own incarnation, leases, metrics port and log lines. The parent starts them,
restarts those that die, forwards signals, and ends when all have ended. It uses no queue and no device. If the parent
dies, the workers shut down gracefully.
"""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from sluice.producer.contract.transport.backoff import Backoff
from sluice.worker.clock import monotonic_s
from sluice.worker.config import CONFIG_FILE_NAME, PREFIX, READ_ELSEWHERE, SETTINGS, WorkerConfig
from sluice.worker.devices import devices_of, is_several
from sluice.worker.errors import ExitCode
from sluice.worker.log import Log, configure_logs, get_log
from sluice.worker.processes.cores import on_cores, own_cores, share_cores
from sluice.worker.signals import block_startup_signals

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
STEADY_S = 60.0
"""A process that ran for this long resets its restart backoff."""

LOOK_EVERY_S = 1.0
"""Interval of polls for ended processes. SIGCHLD usually reports them at once."""

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP, signal.SIGCONT, signal.SIGUSR1)
COMMAND = (sys.executable, "-P", "-m", "sluice.worker", "start", "--until-eof")
_KEPT = READ_ELSEWHERE - {CONFIG_FILE_NAME}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How to start one worker process."""

    name: str
    environ: Mapping[str, str]
    cores: frozenset[int] = frozenset()
    """Cores to pin it to. Empty means any."""


def is_fleet(config: WorkerConfig) -> bool:
    """Return whether the configuration asks for several processes."""
    return config.model.processes > 1 or is_several(config.model.device)


def start_fleet(config: WorkerConfig, environ: Mapping[str, str]) -> ExitCode:
    """Run one worker process per device until all have ended.

    Raises:
        ConfigError: the device is `cuda:all` and there is no GPU.
    """
    configure_logs(config.log)
    return Fleet(process_specs(config, environ), get_log()).run()


def process_specs(config: WorkerConfig, environ: Mapping[str, str]) -> list[ProcessSpec]:
    """Specify one process per device, or several on the CPU that share its cores and memory.

    Raises:
        ConfigError: the device is `cuda:all` and there is no GPU.
    """
    devices = devices_of(config.model.device) * config.model.processes
    is_on_cpu = config.model.device == "cpu"
    cores = share_cores(own_cores(), len(devices)) if is_on_cpu else [frozenset[int]()] * len(devices)
    base = {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name in _KEPT}
    base |= environment_of(config)
    base["SLUICE_PROCESSES"] = "1"
    if is_on_cpu:
        base["SLUICE_MEMORY_FRACTION"] = repr(config.model.memory_share / len(devices))
    return [_process_spec(config, base, index, device, cores[index]) for index, device in enumerate(devices)]


def _process_spec(
    config: WorkerConfig, base: Mapping[str, str], index: int, device: str, cores: frozenset[int]
) -> ProcessSpec:
    device_name = f"gpu{device.partition(':')[2]}" if device != "cpu" else f"cpu{index}"
    name = f"{config.log.name}-{device_name}" if config.log.name else device_name
    own = {"SLUICE_DEVICE": device, "SLUICE_NAME": name}
    if config.metrics.port:
        own["SLUICE_METRICS_PORT"] = str(min(config.metrics.port + index, 65535))
    return ProcessSpec(name=name, environ={**base, **own}, cores=cores)


def environment_of(config: WorkerConfig) -> dict[str, str]:
    """Return the environment from which `load_config` builds `config` again, without settings of `worker callbacks`."""
    values = {
        leaf.env_name: getattr(getattr(config, leaf.section), leaf.name)
        for leaf in SETTINGS
        if leaf.section != "callbacks"
    }
    return {name: str(value).lower() if value in (True, False) and isinstance(value, bool) else str(value)
            for name, value in values.items() if value is not None}  # fmt: skip


class SupervisedProcess:
    """One worker process and its restarts. Changes as processes start and end."""

    def __init__(self, spec: ProcessSpec, command: Sequence[str], log: Log) -> None:
        self._spec = spec
        self._command = list(command)
        self._log = log.bind(name=spec.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0
        self._backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        self.due_s: float | None = 0.0
        """When to start the next process; None while one runs or if none will follow."""

        self.last_code = 0
        """Exit code of the last process."""

    @property
    def is_needed(self) -> bool:
        """Whether a process runs or will be started."""
        return self._process is not None or self.due_s is not None

    def start_if_due(self) -> None:
        """Start the next process if it is due."""
        if self.due_s is None or monotonic_s() < self.due_s:
            return
        self.due_s, self._began_s = None, monotonic_s()
        with on_cores(self._spec.cores), block_startup_signals():
            try:
                # A new session, because Ctrl-C is for the parent, which forwards it once.
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, env=dict(self._spec.environ), start_new_session=True
                )
            except OSError as error:  # out of memory or processes
                self._schedule_restart("worker process cannot be started; retrying", error=str(error))
                return
        self._log.info("worker process started", pid=self._process.pid)

    def look(self, *, is_stopping: bool) -> None:
        """Check whether the process has ended, and schedule a restart unless it ended for good."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process, self.last_code = None, code
        if is_stopping or code == ExitCode.DONE:
            self._log.info("worker process ended", exit_code=code)
        elif code == ExitCode.MISUSED:
            self._log.error("worker process cannot run; a person must act", exit_code=code)
        else:
            self._schedule_restart("worker process died; restarting", exit_code=code)

    def _schedule_restart(self, event: str, **why: object) -> None:
        now_s = monotonic_s()
        if now_s - self._began_s >= STEADY_S:
            self._backoff.reset()
        delay_s = self._backoff.next_delay_s()
        self._log.warning(event, **why, retry_in_s=delay_s)
        self.due_s = now_s + delay_s

    def signal(self, number: int) -> None:
        """Send a signal to the process, if one runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def retire(self) -> None:
        """Start no further process. If one was due, no jobs are held, so this counts as a clean end."""
        if self.due_s is not None:
            self.due_s, self.last_code = None, 0


class Fleet:
    """The parent of worker processes. Changes as they start and end."""

    def __init__(self, specs: Sequence[ProcessSpec], log: Log, *, command: Sequence[str] = COMMAND) -> None:
        self._members = [SupervisedProcess(spec, command, log) for spec in specs]
        self._log = log
        # Safe in a signal handler: `put` takes no lock that the interrupted code could hold.
        self._signals_received: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_quiet = False
        self._is_stopping = False

    def run(self) -> ExitCode:
        """Keep all processes running until asked to stop, or until none can be restarted."""
        with self._signals():
            self._log.info("fleet started", processes=len(self._members), pid=os.getpid())
            while any(member.is_needed for member in self._members):
                for member in self._members:
                    if not self._is_quiet:
                        member.start_if_due()
                self._listen()
                for member in self._members:
                    member.look(is_stopping=self._is_stopping)
        code = self._exit_code()
        self._log.info("fleet ended", exit_code=int(code))
        return code

    def _listen(self) -> None:
        """Wait for a signal until a restart is due, and forward it."""
        due = [member.due_s for member in self._members if member.due_s is not None and not self._is_quiet]
        wait_s = min([LOOK_EVERY_S, *(due_s - monotonic_s() for due_s in due)])
        try:
            number = self._signals_received.get(timeout=max(0.0, wait_s))
        except queue.Empty:
            return
        if number != signal.SIGCHLD:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            # SIGINT would end a process that is still loading with the exit code for broken.
            number = signal.SIGTERM
            self._is_stopping = True
            for member in self._members:
                member.retire()
        elif number in (signal.SIGTSTP, signal.SIGCONT):
            # A process that starts now would pull jobs.
            self._is_quiet = number == signal.SIGTSTP
        for member in self._members:
            member.signal(number)

    def _exit_code(self) -> ExitCode:
        codes = {member.last_code for member in self._members}
        if ExitCode.MISUSED in codes:
            return ExitCode.MISUSED
        # A process that was stopped before it handled SIGTERM held no jobs.
        return ExitCode.DONE if codes <= {ExitCode.DONE, -signal.SIGTERM} else ExitCode.BROKEN

    @contextmanager
    def _signals(self) -> Generator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in (*PASSED_ON, signal.SIGCHLD)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals_received.put(number)
