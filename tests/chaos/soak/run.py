"""One soak: a reference run without faults, load with faults, drain, then the checker. Read `Soak.run` first."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from sluice.producer.client import Producer
from sluice.protocol.calls import QueueSettings
from tests.chaos.catalogue import catalogue_of, write_reference
from tests.chaos.faults.proxies import cutting_proxy
from tests.chaos.soak.callbacks import SECRET, deliver_all, receiver
from tests.chaos.soak.fleet import Command, Fleet, fleet
from tests.chaos.soak.limits import MAX_RUNNING, TOKENS_PER_MINUTE, LimitObserver
from tests.chaos.soak.nemesis import Nemesis, Targets, Weather, is_kill
from tests.chaos.soak.takeover import Takeovers, measure
from tests.end_to_end.processes import worker_pool
from tests.forks import ROOT
from tests.integration.jobs import KEYS, wait_until
from tests.servers import RedisServer, redis_server

MEAN_S = {
    "kill -9 of a worker": 0.6,
    "kill -9 of a worker with its parent": 6.0,
    "kill -9 of a worker's parent": 20.0,
    "SIGSTOP past the lifetime": 20.0,
    "SIGTERM of a worker": 30.0,
    "restart of Redis, SIGKILL": 90.0,
    "restart of Redis, SIGTERM": 240.0,
    "slow link": 25.0,
    "cut connections": 15.0,
    "CLIENT KILL": 60.0,
    "SCRIPT FLUSH": 15.0,
    "full memory": 25.0,
    "SQL away": 60.0,
    "kill -9 of a recorder": 40.0,
    "kill -9 of a producer": 40.0,
    "kill -9 of a mover": 60.0,
    "kill -9 of a sender": 20.0,
}
"""Mean seconds between two faults of a kind."""

CHANNEL_KEPT_MS = 4 * 3_600_000
"""Longer than a soak, so that the checker finds every channel."""

MAX_WAITING_JOBS = 300
MAX_NUM_SEQS = 16
REPORT_EVERY_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    """Load, duration and fault rates."""

    seed: int
    folder: Path
    name: str = "null"
    jobs: int = 100_000
    kills: int = 1000
    at_most_s: float = 1500.0
    jobs_per_s: float = 80.0
    model: str = "null?step_s=0.003"
    dtype: str = "auto"
    catalogue_size: int = 300
    max_tokens: int = 60
    num_workers: int = 6
    num_producers: int = 3
    num_movers: int = 2
    """`worker callbacks`, each with a sender."""

    beat_s: float = 1.0
    life_s: float = 4.0
    mean_s: dict[str, float] = field(default_factory=lambda: dict(MEAN_S))
    drain_s: float = 900.0
    """Longest wait for the queue to drain, once faults have ended."""

    @property
    def catalogue(self) -> str:
        """As on a producer's command line."""
        return f"{self.seed}:{self.catalogue_size}:{self.max_tokens}"

    @property
    def database_url(self) -> str:
        """Of the history."""
        return f"sqlite:///{self.folder}/history.db"

    @property
    def deliveries(self) -> Path:
        """The requests that the receiver of callbacks recorded."""
        return self.folder / "deliveries.jsonl"


@dataclass(slots=True, eq=False)
class Report:
    """The figures of a soak, or the sum of several. Mutable."""

    seconds: float = 0.0
    acknowledged: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])
    takeovers: Takeovers = field(default_factory=Takeovers)
    checker: str = ""
    is_sound: bool = True

    @property
    def num_kills(self) -> int:
        """Processes that died by SIGKILL."""
        return sum(number for name, number in self.faults.items() if is_kill(name))

    def add(self, other: "Report") -> None:
        """Sum up."""
        self.seconds += other.seconds
        self.acknowledged += other.acknowledged
        self.faults += other.faults
        self.takeovers.add(other.takeovers)
        self.checker += other.checker
        self.is_sound = self.is_sound and other.is_sound

    def text(self) -> str:
        """Return a readable report."""
        first = (
            f"{self.acknowledged} jobs acknowledged in {self.seconds:.0f} s, {self.num_kills} processes killed by "
            "SIGKILL; faults:"
        )
        faults = [f"  {number:>5} x {name}" for name, number in self.faults.most_common()]
        return "\n".join([first, *faults, *self.takeovers.lines(), self.checker])


def run(settings: SoakSettings, say: Callable[[str], object]) -> Report:
    """Run a soak to its end."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    say(f"soak {settings.name}: seed {settings.seed}, logs and journals in {settings.folder}")
    write_undisturbed(settings.folder, settings.catalogue, _worker_settings(settings))
    with ExitStack() as stack:
        # A killed server has lost nothing then; what a lost second does is another test's question.
        server = stack.enter_context(redis_server(is_durable=True, extra=("--appendfsync", "always")))
        return _Soak(settings, server, stack, say).run()


def write_undisturbed(folder: Path, catalogue: str, worker: Mapping[str, str]) -> None:
    """Run a whole catalogue on one worker without faults, on a separate server."""
    with redis_server() as server, worker_pool(server.url, folder) as workers:
        workers.start(**worker)
        with Producer(server.url) as producer:
            write_reference(producer, catalogue_of(catalogue), folder / "reference.json")


def _worker_settings(settings: SoakSettings) -> dict[str, str]:
    return {
        "MODEL": settings.model,
        "TOOL_FORMAT": "hermes",
        "DTYPE": settings.dtype,
        "MAX_NUM_SEQS": str(MAX_NUM_SEQS),
        "RECORDER": "false",
        "METRICS": "false",
        "LOG_FORMAT": "json",
        "LOG_LEVEL": "warning",
        "BEAT_EVERY_S": str(settings.beat_s),
        "BEAT_LIFE_S": str(settings.life_s),
        "DRAIN": "hand-over",
    }


class _Soak:
    def __init__(
        self, settings: SoakSettings, server: RedisServer, stack: ExitStack, say: Callable[[str], object]
    ) -> None:
        self._settings = settings
        self._server = server
        self._stack = stack
        self._say = say
        self._report = Report()

    def run(self) -> Report:
        with Producer(self._server.url) as producer:
            settings = QueueSettings(
                max_waiting_jobs=MAX_WAITING_JOBS,
                channel_ttl_ms=CHANNEL_KEPT_MS,
                max_running=MAX_RUNNING,
                tokens_per_minute=TOKENS_PER_MINUTE,
            )
            producer.configure(settings)
        limits = LimitObserver(self._client())
        weather = Weather()
        workers, recorders, producers, callbacks = self._start_all(weather)
        nemesis = self._nemesis(workers, recorders, producers, callbacks, weather)
        with self._client() as client:
            wait_until(lambda: self._only_living(client, workers), "the workers are there", patience_s=120)
        began_s = time.monotonic()
        nemesis.start()
        self._watch(nemesis)
        # Undo faults first: a producer ends when its jobs are acknowledged.
        nemesis.stop()
        producers.stop()
        self._report.seconds, self._report.faults = time.monotonic() - began_s, nemesis.counts
        self._say("quiet now: the queue runs empty")
        self._drain(workers, recorders, callbacks)
        limits.stop()
        self._read_the_books(nemesis)
        self._report.checker += "\n".join([limits.text(), *limits.problems(), ""])
        self._report.is_sound = self._report.is_sound and not limits.problems()
        return self._report

    # ------------------------------------------------------------ the parts

    def _client(self) -> Any:  # Any: a redis-py client
        return self._server.client()

    def _start_all(self, weather: Weather) -> tuple[Fleet, Fleet, Fleet, Fleet]:
        settings, folder, stack = self._settings, self._settings.folder, self._stack
        proxy = stack.enter_context(
            cutting_proxy(self._server.folder / "proxy.sock", self._server.socket_path, weather.cut)
        )
        urls = [proxy.url, *[self._server.url] * (settings.num_workers - 1)]
        worker = [_always("sluice.worker", "start", "--redis-url", url) for url in urls]
        places = ["--redis-url", self._server.url, "--database-url", settings.database_url]
        workers = stack.enter_context(fleet("worker", worker, folder, **_worker_settings(settings)))
        recorders = stack.enter_context(
            fleet("recorder", [_always("sluice.worker", "record", *places)] * 2, folder, LOG_LEVEL="warning")
        )
        callbacks = stack.enter_context(self._callbacks(places))
        url = stack.enter_context(receiver(settings.deliveries, settings.seed))
        shooters = [self._producer(i, url) for i in range(settings.num_producers)]
        return workers, recorders, stack.enter_context(fleet("producer", shooters, folder)), callbacks

    def _callbacks(self, places: Sequence[str]) -> AbstractContextManager[Fleet]:
        commands = [_always("sluice.worker", "callbacks", *places)] * self._settings.num_movers
        return fleet(
            "callbacks", commands, self._settings.folder, True, LOG_LEVEL="warning",
            CALLBACKS_SECRET=SECRET, CALLBACKS_NETWORKS="127.0.0.0/8", CALLBACKS_SENDERS="1",
        )  # fmt: skip

    def _producer(self, number: int, callback_url: str) -> Command:
        settings = self._settings

        def command(start: int) -> Sequence[str]:
            name = f"p{number}-{start}"
            return [
                "tests.chaos.soak.producing", "--redis-url", self._server.url, "--name", name,
                "--seed", str(settings.seed * 10_000 + number * 1000 + start),
                "--journal", str(settings.folder / f"journal-{name}.jsonl"), "--catalogue", settings.catalogue,
                "--callback-url", callback_url, "--jobs-per-s", str(settings.jobs_per_s / settings.num_producers),
            ]  # fmt: skip

        return command

    def _nemesis(
        self, workers: Fleet, recorders: Fleet, producers: Fleet, callbacks: Fleet, weather: Weather
    ) -> Nemesis:
        targets = Targets(
            server=self._server, workers=workers, recorders=recorders, producers=producers, callbacks=callbacks,
            weather=weather, history=self._settings.folder / "history.db", prefix=KEYS.prefix,
            life_s=self._settings.life_s, max_num_seqs=MAX_NUM_SEQS,
        )  # fmt: skip
        return Nemesis(targets, self._settings.seed, self._settings.mean_s)

    # ------------------------------------------------------------ the phases

    def _watch(self, nemesis: Nemesis) -> None:
        """Wait until there are enough jobs and kills, or the time is over."""
        settings, began_s = self._settings, time.monotonic()
        next_s = began_s
        while (now_s := time.monotonic()) < began_s + settings.at_most_s and nemesis.trouble is None:
            submitted = self._submitted()
            if submitted >= settings.jobs and nemesis.num_kills >= settings.kills:
                return
            if now_s >= next_s:
                load = os.getloadavg()[0]
                self._say(f"{now_s - began_s:6.0f} s: {submitted} jobs, {nemesis.num_kills} kills, load {load:.0f}")
                next_s = now_s + REPORT_EVERY_S
            time.sleep(0.2)

    def _submitted(self) -> int:
        try:
            with self._client() as client:
                return int(client.hget(KEYS.key("counters"), "submitted") or 0)
        except redis.RedisError:
            return 0

    def _drain(self, workers: Fleet, recorders: Fleet, callbacks: Fleet) -> None:
        """Wait until every job ended, the dead set is empty, events are recorded and callbacks delivered; stop all."""
        with self._client() as client:
            wait_until(lambda: is_empty(client), "every job has ended", patience_s=self._settings.drain_s)
            wait_until(lambda: self._only_living(client, workers), "the dead are cleared away", patience_s=60)
            workers.stop()
            wait_until(lambda: not num_unrecorded(client), "all is recorded", patience_s=self._settings.drain_s)
            recorders.stop()
            deliver_all(client, callbacks, patience_s=self._settings.drain_s)
        callbacks.stop()

    def _only_living(self, client: Any, workers: Fleet) -> bool:
        alive = client.zrange(KEYS.key("alive"), 0, -1)
        pids = {int(client.hget(KEYS.key("worker", one.decode()), "pid") or 0) for one in alive}
        return len(alive) == len(workers.members) and pids == workers.by_worker_pid().keys()

    def _read_the_books(self, nemesis: Nemesis) -> None:
        settings, report = self._settings, self._report
        command = [
            sys.executable, "-m", "tests.chaos.checker", "--redis-url", self._server.url,
            "--database-url", settings.database_url, "--reference", str(settings.folder / "reference.json"),
            "--deliveries", str(settings.deliveries), "--secret", SECRET,
        ]  # fmt: skip
        for journal in sorted(settings.folder.glob("journal-*.jsonl")):
            command += ["--journal", str(journal)]
            report.acknowledged += journal.read_text().count('{"acknowledged"')
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        report.checker, report.is_sound = done.stdout + done.stderr, done.returncode == 0
        with self._client() as client:
            report.takeovers = measure(client, KEYS.prefix, settings.database_url, nemesis)
        (settings.folder / "takeovers.jsonl").write_text("\n".join(report.takeovers.rows))


def _always(*command: str) -> Command:
    return lambda _start: command


def is_empty(client: Any) -> bool:  # Any: a redis-py client
    """Whether every job has ended, and no tenant is at a limit: one whose job took more tokens may be for a while."""
    waiting, running = client.hmget(KEYS.key("counters"), "waiting_jobs", "running_jobs")
    return int(waiting or 0) == 0 and int(running or 0) == 0 and not client.exists(KEYS.key("parked"))


def num_unrecorded(client: Any) -> int:  # Any: as above
    """Entries of the outbox that no recorder has written yet."""
    return int(client.xlen(KEYS.outbox))
