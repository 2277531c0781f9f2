"""Does harm, by the dice of a printed seed: each kind now and then, with what undoes it some time later."""

import heapq
import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from tests.chaos.soak.fleet import Fleet, Ship
from tests.servers import RedisServer

Heal = tuple[float, Callable[[], object]]
"""Seconds until the harm is undone, and how."""

Harm = Callable[[], Heal | None]
RETRY_S = 0.1
LIFE_FACTOR = (1.2, 2.5)
"""A zombie stays stopped for this many lives."""


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that was killed: who, when by the server's clock, and how many jobs it held."""

    incarnation: str
    at_ms: int
    held: int


@dataclass(order=True, slots=True)
class Due:
    """A harm to be done, or one to be undone."""

    due_s: float
    name: str
    undo: Callable[[], object] | None = field(default=None, compare=False)


@dataclass(slots=True, eq=False)
class Weather:
    """How bad the connection of those behind the proxy is. Changes."""

    delay_s: float = 0.0
    is_cutting: bool = False
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def cut(self, _data: bytes) -> bool:
        """For `CuttingProxy`: wait as long as the link is slow, then say whether the reply is lost."""
        if self.delay_s:
            time.sleep(self.delay_s)
        return self.is_cutting and self.dice.random() < 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Whom harm can reach."""

    server: RedisServer
    workers: Fleet
    recorders: Fleet
    producers: Fleet
    callbacks: Fleet
    weather: Weather
    history: Path
    prefix: str
    life_s: float


class Nemesis:
    """Runs on its own thread until it is stopped; then all is healed."""

    def __init__(self, targets: Targets, seed: int, mean_s: dict[str, float]) -> None:
        self._targets = targets
        self._dice = random.Random(seed)
        self._mean_s = mean_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._rage, name="nemesis", daemon=True)
        self._agenda: list[Due] = []
        self._stopped: set[int] = set()
        self.deaths: list[Death] = []
        self.outages: list[tuple[int, str]] = []
        """Times at which Redis, or every connection to it, was harmed."""

        self.counts: Counter[str] = Counter()
        self.trouble: BaseException | None = None
        self._harms: dict[str, Harm] = {
            "kill -9 of a worker": self._kill,
            "SIGSTOP past the life": self._freeze,
            "SIGTERM of a worker": self._drain,
            "restart of Redis, SIGKILL": lambda: self._restart(crash=True),
            "restart of Redis, SIGTERM": lambda: self._restart(crash=False),
            "slow link": self._slow,
            "cut connections": self._cut,
            "CLIENT KILL": self._client_kill,
            "SCRIPT FLUSH": self._flush,
            "full memory": self._fill,
            "SQL away": self._lock_history,
            "kill -9 of a recorder": lambda: self._kill_one(self._targets.recorders),
            "kill -9 of a producer": lambda: self._kill_one(self._targets.producers),
            "kill -9 of a mover": lambda: self._kill_one(self._targets.callbacks),
            "kill -9 of a sender": self._kill_sender,
        }
        assert mean_s.keys() <= self._harms.keys(), mean_s.keys() - self._harms.keys()

    @property
    def num_kills(self) -> int:
        """Processes that died by SIGKILL."""
        return sum(number for name, number in self.counts.items() if is_kill(name))

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and undo all that is to be undone."""
        self._stopping.set()
        self._thread.join()
        if self.trouble is not None:
            raise self.trouble

    # ------------------------------------------------------------ when

    def _rage(self) -> None:
        try:
            self._act_until_stopped()
        except BaseException as error:  # noqa: BLE001  # whoever stops it hears of it
            self.trouble = error

    def _act_until_stopped(self) -> None:
        for name in self._mean_s:
            self._plan(name)
        while not self._stopping.wait(max(0.0, self._agenda[0].due_s - time.monotonic())):
            due = heapq.heappop(self._agenda)
            if due.undo is not None:
                self._heal(due.undo)
            else:
                self._try(due.name)
                self._plan(due.name)
        for undo in [due.undo for due in self._agenda if due.undo is not None]:
            while not _heard(undo):
                time.sleep(RETRY_S)

    def _plan(self, name: str) -> None:
        in_s = self._dice.expovariate(1 / self._mean_s[name])
        heapq.heappush(self._agenda, Due(time.monotonic() + in_s, name))

    def _heal(self, undo: Callable[[], object]) -> None:
        if not _heard(undo):
            heapq.heappush(self._agenda, Due(time.monotonic() + RETRY_S, "", undo))

    def _try(self, name: str) -> None:
        try:
            heal = self._harms[name]()
        except (redis.ConnectionError, redis.TimeoutError, sqlite3.OperationalError, ProcessLookupError, NobodyThere):
            # Whom it would meet is away already.
            return
        self.counts[name] += 1
        if heal is not None:
            heapq.heappush(self._agenda, Due(time.monotonic() + heal[0], "", heal[1]))

    # ------------------------------------------------------------ workers

    def _serving(self, client: Any) -> list[tuple[str, Ship]]:  # Any: a redis-py client
        """(incarnation, ship) of those that live and are not frozen."""
        prefix, ships = self._targets.prefix, self._targets.workers.by_pid()
        found: list[tuple[str, Ship]] = []
        for incarnation in client.zrange(f"{prefix}:alive", 0, -1):
            pid = int(client.hget(f"{prefix}:worker:{incarnation.decode()}", "pid") or 0)
            if pid in ships and pid not in self._stopped:
                found.append((incarnation.decode(), ships[pid]))
        return found

    def _kill(self) -> None:
        """One that has jobs, if there is one."""
        with self._client() as client:
            serving = self._serving(client)
            if not serving:
                raise NobodyThere
            held = {one: client.hlen(f"{self._targets.prefix}:held:{one}") for one, _ in serving}
            busy = [pair for pair in serving if held[pair[0]]] or serving
            incarnation, ship = self._dice.choice(busy)
            ship.signal(signal.SIGKILL)
            seconds, micros = client.time()
            self.deaths.append(Death(incarnation, seconds * 1000 + micros // 1000, held[incarnation]))

    def _freeze(self) -> Heal:
        with self._client() as client:
            serving = self._serving(client)
        if len(serving) < 2:
            raise NobodyThere
        ship = self._dice.choice(serving)[1]
        pid = ship.pid
        ship.signal(signal.SIGSTOP)
        self._stopped.add(pid)

        def go_on() -> None:
            self._stopped.discard(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        return self._targets.life_s * self._dice.uniform(*LIFE_FACTOR), go_on

    def _drain(self) -> None:
        with self._client() as client:
            serving = self._serving(client)
        if not serving:
            raise NobodyThere
        self._dice.choice(serving)[1].signal(signal.SIGTERM)

    def _kill_one(self, ships: Fleet) -> None:
        self._dice.choice(ships.ships).signal(signal.SIGKILL)

    def _kill_sender(self) -> None:
        """A process of `worker callbacks` in which rq works."""
        ships = [ship for ship in self._targets.callbacks.ships if ship.process.is_alive()]
        try:
            children = [child for ship in ships for child in psutil.Process(ship.pid).children()]
            senders = [child for child in children if any("spawn_main" in part for part in child.cmdline())]
            self._dice.choice(senders).kill()
        except (psutil.NoSuchProcess, IndexError) as error:
            raise NobodyThere from error

    # ------------------------------------------------------------ servers and links

    def _client(self) -> Any:  # Any: a redis-py client
        return self._targets.server.client()

    def _note_outage(self, name: str) -> None:
        self.outages.append((round(time.time() * 1000), name))

    def _restart(self, *, crash: bool) -> None:
        self._note_outage("restart")
        with suppress(TimeoutError):
            self._targets.server.restart(crash=crash)
        # With many jobs on a busy machine it reads its file for longer than a test would wait.
        while not _heard(lambda: self._targets.server.client().ping()):
            time.sleep(RETRY_S)
        self._note_outage("restarted")

    def _slow(self) -> Heal:
        self._targets.weather.delay_s = self._dice.uniform(0.01, 0.2)
        return self._dice.uniform(2, 6), lambda: setattr(self._targets.weather, "delay_s", 0.0)

    def _cut(self) -> Heal:
        self._targets.weather.is_cutting = True
        return self._dice.uniform(2, 6), lambda: setattr(self._targets.weather, "is_cutting", False)

    def _client_kill(self) -> None:
        # Nobody reclaims for one life after a connection of its own broke.
        self._note_outage("CLIENT KILL")
        with self._client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def _flush(self) -> None:
        with self._client() as client:
            client.script_flush()

    def _fill(self) -> Heal:
        """Below what is used: nothing more may be submitted."""
        with self._client() as client:
            client.config_set("maxmemory", "1mb")
        return self._dice.uniform(0.5, 2), self._give_memory

    def _give_memory(self) -> None:
        with self._client() as client:
            client.config_set("maxmemory", "0")

    def _lock_history(self) -> Heal:
        """Another program holds the database: nobody can write for a while."""
        history = self._targets.history
        if not history.exists():
            raise NobodyThere
        holder = sqlite3.connect(history, timeout=1, check_same_thread=False, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")

        def let_go() -> None:
            holder.execute("ROLLBACK")
            holder.close()

        return self._dice.uniform(4, 12), let_go


def is_kill(harm: str) -> bool:
    """Whether a process died by SIGKILL."""
    return "kill -9" in harm or "SIGKILL" in harm


def _heard(undo: Callable[[], object]) -> bool:
    """Whether Redis heard it; it may be away just now."""
    try:
        undo()
    except (redis.ConnectionError, redis.TimeoutError):
        return False
    return True


class NobodyThere(Exception):
    """There is nobody whom this harm could meet now."""
