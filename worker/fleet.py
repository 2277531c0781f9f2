"""`worker start` with several worker processes on one host: one for each GPU, or several on the CPU.

Each is a worker like any other: an incarnation, leases, a port for metrics and log lines of its own. This parent only
starts them, starts one again that died, passes signals on, and ends when all are gone. It touches no queue and no
device, so nothing of it can stop a worker; when it dies itself, they drain and go.
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

from worker.clock import monotonic_s
from worker.config import CONFIG_FILE_NAME, PREFIX, READ_ELSEWHERE, SETTINGS, WorkerConfig
from worker.cores import on_cores, own_cores, share_cores
from worker.devices import devices_of, is_several
from worker.early import held_back
from worker.errors import ExitCode
from worker.log import Log, configure_logs, get_log

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
STEADY_S = 60.0
"""Who lived for so long is started again as after a first death."""

LOOK_EVERY_S = 1.0
"""A death is heard of at once by a signal; this often it is looked for."""

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP, signal.SIGCONT, signal.SIGUSR1)
COMMAND = (sys.executable, "-m", "worker", "start", "--until-eof")
_KEPT = READ_ELSEWHERE - {CONFIG_FILE_NAME}


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A place that one worker process fills, one life after the other."""

    name: str
    environ: Mapping[str, str]
    cores: frozenset[int] = frozenset()
    """Empty: any."""


def is_fleet(config: WorkerConfig) -> bool:
    """Whether the configuration asks for several processes."""
    return config.model.processes > 1 or is_several(config.model.device)


def start_fleet(config: WorkerConfig, environ: Mapping[str, str]) -> ExitCode:
    """Run a worker process for each device, until all are gone.

    Raises:
        ConfigError: all GPUs are asked for, and there is none.
    """
    configure_logs(config.log)
    return Fleet(posts_of(config, environ), get_log()).run()


def posts_of(config: WorkerConfig, environ: Mapping[str, str]) -> list[Post]:
    """A post for each device, or for each process on the CPU: those share its cores and its memory.

    Raises:
        ConfigError: all GPUs are asked for, and there is none.
    """
    devices = devices_of(config.model.device) * config.model.processes
    is_on_cpu = config.model.device == "cpu"
    cores = share_cores(own_cores(), len(devices)) if is_on_cpu else [frozenset[int]()] * len(devices)
    base = {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name in _KEPT}
    base |= environment_of(config)
    base["SLUICE_PROCESSES"] = "1"
    if is_on_cpu:
        base["SLUICE_MEMORY_FRACTION"] = repr(config.model.memory_share / len(devices))
    return [_post(config, base, index, device, cores[index]) for index, device in enumerate(devices)]


def _post(config: WorkerConfig, base: Mapping[str, str], index: int, device: str, cores: frozenset[int]) -> Post:
    place = f"gpu{device.partition(':')[2]}" if device != "cpu" else f"cpu{index}"
    name = f"{config.log.name}-{place}" if config.log.name else place
    own = {"SLUICE_DEVICE": device, "SLUICE_NAME": name}
    if config.metrics.port:
        own["SLUICE_METRICS_PORT"] = str(min(config.metrics.port + index, 65535))
    return Post(name=name, environ={**base, **own}, cores=cores)


def environment_of(config: WorkerConfig) -> dict[str, str]:
    """The environment from which `load_config` builds `config` again, but for what only `worker callbacks` reads."""
    values = {
        leaf.env_name: getattr(getattr(config, leaf.section), leaf.name)
        for leaf in SETTINGS
        if leaf.section != "callbacks"
    }
    return {name: str(value).lower() if value in (True, False) and isinstance(value, bool) else str(value)
            for name, value in values.items() if value is not None}  # fmt: skip


class Member:
    """Who fills a post: the present process, and how its lives went. Changes as they begin and end."""

    def __init__(self, post: Post, command: Sequence[str], log: Log) -> None:
        self._post = post
        self._command = list(command)
        self._log = log.bind(name=post.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0
        self._delay_s = FIRST_DELAY_S
        self.due_s: float | None = 0.0
        """When the next life begins; None: one goes on, or there will be none."""

        self.last_code = 0
        """How the last life ended."""

    @property
    def is_needed(self) -> bool:
        """Whether there is, or will be, a process."""
        return self._process is not None or self.due_s is not None

    def start_if_due(self) -> None:
        """Begin the next life, if it is time."""
        if self.due_s is None or monotonic_s() < self.due_s:
            return
        self.due_s, self._began_s = None, monotonic_s()
        with on_cores(self._post.cores), held_back():
            try:
                # A session of its own: Ctrl-C is for the parent, which passes it on once.
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, env=dict(self._post.environ), start_new_session=True
                )
            except OSError as error:  # no memory, or no process more, for now
                self._plan_next_life("worker process cannot be started; trying again", error=str(error))
                return
        self._log.info("worker process started", pid=self._process.pid)

    def look(self, *, is_stopping: bool) -> None:
        """See whether the process has ended, and what follows."""
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
            self._plan_next_life("worker process died; starting it again", exit_code=code)

    def _plan_next_life(self, event: str, **why: object) -> None:
        now_s = monotonic_s()
        if now_s - self._began_s >= STEADY_S:
            self._delay_s = FIRST_DELAY_S
        self._log.warning(event, **why, retry_in_s=self._delay_s)
        self.due_s = now_s + self._delay_s
        self._delay_s = min(self._delay_s * 2, MAX_DELAY_S)

    def signal(self, number: int) -> None:
        """Pass a signal on, if there is a process."""
        if self._process is not None:
            self._process.send_signal(number)

    def retire(self) -> None:
        """Begin no further life. Where one was due, nothing is held and all is well: it ends as asked."""
        if self.due_s is not None:
            self.due_s, self.last_code = None, 0


class Fleet:
    """The parent of worker processes. Changes as they come and go."""

    def __init__(self, posts: Sequence[Post], log: Log, *, command: Sequence[str] = COMMAND) -> None:
        self._members = [Member(post, command, log) for post in posts]
        self._log = log
        # A signal handler may put: it takes no lock that the interrupted code could hold.
        self._heard: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_quiet = False
        self._is_stopping = False

    def run(self) -> ExitCode:
        """Keep every post filled until asked to stop, or until nobody is left who could go on."""
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
        """Wait for a signal until something is due, and pass it on."""
        due = [member.due_s for member in self._members if member.due_s is not None and not self._is_quiet]
        wait_s = min([LOOK_EVERY_S, *(due_s - monotonic_s() for due_s in due)])
        try:
            number = self._heard.get(timeout=max(0.0, wait_s))
        except queue.Empty:
            return
        if number != signal.SIGCHLD:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            # Ctrl-C ends a process that still loads with a code that says broken; for the others both are the same.
            number = signal.SIGTERM
            self._is_stopping = True
            for member in self._members:
                member.retire()
        elif number in (signal.SIGTSTP, signal.SIGCONT):
            # One that starts now would pull.
            self._is_quiet = number == signal.SIGTSTP
        for member in self._members:
            member.signal(number)

    def _exit_code(self) -> ExitCode:
        codes = {member.last_code for member in self._members}
        if ExitCode.MISUSED in codes:
            return ExitCode.MISUSED
        # Who was asked to stop before it could handle the signal held nothing.
        return ExitCode.DONE if codes <= {ExitCode.DONE, -signal.SIGTERM} else ExitCode.BROKEN

    @contextmanager
    def _signals(self) -> Generator[None]:
        before = {number: signal.signal(number, self._hear) for number in (*PASSED_ON, signal.SIGCHLD)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self._heard.put(number)
