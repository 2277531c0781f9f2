"""Inject faults at random from a printed seed: each kind periodically, each undone some time later."""

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

from sluice.protocol.clock import wall_ms
from tests.chaos.soak.fleet import Fleet, Supervised
from tests.servers import RedisServer

Undo = tuple[float, Callable[[], object]]
"""Seconds until the fault is undone, and the function that undoes it."""

FaultAction = Callable[[], Undo | None]
RETRY_S = 0.1
SEEN_WITHIN_S = 1.0
"""A parent that is killed this soon after its worker may not have reported it, on a busy machine."""

LIFE_FACTOR = (1.2, 2.5)
"""A zombie stays stopped for this many lives."""


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that was killed."""

    incarnation: str
    at_ms: int
    """Of the server."""

    parent: int
    """Process id of its parent."""

    has_room: bool
    """Whether the other workers had room for all its jobs."""


@dataclass(order=True, slots=True)
class Due:
    """A fault to inject, or one to undo."""

    due_s: float
    name: str
    undo: Callable[[], object] | None = field(default=None, compare=False)


@dataclass(slots=True, eq=False)
class Weather:
    """The quality of the connections through the proxy. Mutable."""

    delay_s: float = 0.0
    is_cutting: bool = False
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def cut(self, _data: bytes) -> bool:
        """For `CuttingProxy`: delay by the link's latency, then return whether the reply is lost."""
        if self.delay_s:
            time.sleep(self.delay_s)
        return self.is_cutting and self.dice.random() < 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The processes and servers that faults apply to."""

    server: RedisServer
    workers: Fleet
    recorders: Fleet
    producers: Fleet
    callbacks: Fleet
    weather: Weather
    history: Path
    prefix: str
    life_s: float
    max_num_seqs: int
    """Of each worker."""


class Nemesis:
    """A thread that injects faults until it is stopped; then it undoes them all."""

    def __init__(self, targets: Targets, seed: int, mean_s: dict[str, float]) -> None:
        self._targets = targets
        self._dice = random.Random(seed)
        self._mean_s = mean_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._rage, name="nemesis", daemon=True)
        self._agenda: list[Due] = []
        self._stopped: set[int] = set()
        self._killed_ms: dict[int, int] = {}
        """Times by process id. A killed process may take a while to end, and is no target meanwhile."""

        self._leaving: set[str] = set()
        self._died_alone: set[bytes] = set()
        """Jobs whose worker was killed or stopped while it held no other job."""

        self.deaths: list[Death] = []
        self.stops: list[tuple[int, str]] = []
        """Times and incarnations of workers that were stopped (SIGSTOP)."""

        self.outages: list[tuple[int, str]] = []
        """Times of faults of Redis, or of every connection to it."""

        self.weather: list[tuple[int, int]] = []
        """Times in which the link of the first worker was slow or cut."""

        self.linked: set[str] = set()
        """Incarnations of the first worker."""

        self.counts: Counter[str] = Counter()
        self.trouble: BaseException | None = None
        self._faults: dict[str, FaultAction] = {
            "kill -9 of a worker": lambda: self._kill(with_parent=False),
            "kill -9 of a worker with its parent": lambda: self._kill(with_parent=True),
            "kill -9 of a worker's parent": lambda: self._kill_one(self._targets.workers),
            "SIGSTOP past the lifetime": self._freeze,
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
        assert mean_s.keys() <= self._faults.keys(), mean_s.keys() - self._faults.keys()

    @property
    def num_kills(self) -> int:
        """Processes that died by SIGKILL."""
        return sum(number for name, number in self.counts.items() if is_kill(name))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and undo every fault."""
        self._stopping.set()
        self._thread.join()
        if self.trouble is not None:
            raise self.trouble

    # ------------------------------------------------------------ when

    def _rage(self) -> None:
        try:
            self._act_until_stopped()
        except BaseException as error:  # noqa: BLE001  # raised again where it is stopped
            self.trouble = error

    def _act_until_stopped(self) -> None:
        for name in self._mean_s:
            self._plan(name)
        while not self._stopping.wait(max(0.0, self._agenda[0].due_s - time.monotonic())):
            due = heapq.heappop(self._agenda)
            if due.undo is not None:
                self._undo(due.undo)
            else:
                self._try(due.name)
                self._plan(due.name)
        for undo in [due.undo for due in self._agenda if due.undo is not None]:
            while not _is_executed(undo):
                time.sleep(RETRY_S)

    def _plan(self, name: str) -> None:
        in_s = self._dice.expovariate(1 / self._mean_s[name])
        heapq.heappush(self._agenda, Due(time.monotonic() + in_s, name))

    def _undo(self, undo: Callable[[], object]) -> None:
        if not _is_executed(undo):
            heapq.heappush(self._agenda, Due(time.monotonic() + RETRY_S, "", undo))

    def _try(self, name: str) -> None:
        try:
            undo = self._faults[name]()
        except (redis.ConnectionError, redis.TimeoutError, sqlite3.OperationalError, ProcessLookupError, NoTarget):
            # Its target is down already.
            return
        self.counts[name] += 1
        if undo is not None:
            heapq.heappush(self._agenda, Due(time.monotonic() + undo[0], "", undo[1]))

    # ------------------------------------------------------------ workers

    def _serving(self, client: Any) -> list[tuple[str, int, Supervised]]:  # Any: a redis-py client
        """Return (incarnation, process id, its parent) of live workers that are neither frozen nor spared."""
        prefix, members = self._targets.prefix, self._targets.workers.by_worker_pid()
        found: list[tuple[str, int, Supervised]] = []
        for incarnation in (one.decode() for one in client.zrange(f"{prefix}:alive", 0, -1)):
            pid = int(client.hget(f"{prefix}:worker:{incarnation}", "pid") or 0)
            if pid not in members or pid in self._stopped or {pid, members[pid].pid} & self._killed_ms.keys():
                continue
            if self._is_spared(self._held(client, incarnation)):
                continue
            found.append((incarnation, pid, members[pid]))
            if members[pid] is self._targets.workers.members[0]:
                self.linked.add(incarnation)
        return found

    def _held(self, client: Any, incarnation: str) -> list[bytes]:  # Any: a redis-py client
        return list(client.hkeys(f"{self._targets.prefix}:held:{incarnation}"))

    def _is_spared(self, held: list[bytes]) -> bool:
        """Return whether a worker runs only a job that has died alone: two such deaths may fail it, by design."""
        return len(held) == 1 and held[0] in self._died_alone

    def _note_alone(self, held: list[bytes]) -> None:
        if len(held) == 1:
            self._died_alone.update(held)

    def _kill(self, *, with_parent: bool) -> None:
        """Choose a worker that has jobs, if there is one. With its parent, nobody is left to report it."""
        with self._client() as client:
            serving = self._serving(client)
            if not serving:
                raise NoTarget
            held = {one: self._held(client, one) for one, _, _ in serving}
            busy = [one for one in serving if held[one[0]]] or serving
            incarnation, pid, parent = self._dice.choice(busy)
            parent_pid, others = parent.pid, held.keys() - self._leaving - {incarnation}
            room = sum(max(0, self._targets.max_num_seqs - len(held[one])) for one in others)
            self._note_alone(held[incarnation])
            seconds, micros = client.time()
            if with_parent:
                self._kill_member(parent)
            os.kill(pid, signal.SIGKILL)
        self._killed_ms[pid] = wall_ms()
        at_ms, has_room = seconds * 1000 + micros // 1000, room >= len(held[incarnation])
        self.deaths.append(Death(incarnation, at_ms, parent_pid, has_room))

    def is_seen(self, death: Death) -> bool:
        """Return whether the parent lived long enough to report the death."""
        killed_ms = self._killed_ms.get(death.parent)
        return killed_ms is None or killed_ms > death.at_ms + SEEN_WITHIN_S * 1000

    def _freeze(self) -> Undo:
        with self._client() as client:
            serving = self._serving(client)
            if len(serving) < 2:
                raise NoTarget
            incarnation, pid, _ = self._dice.choice(serving)
            self._note_alone(self._held(client, incarnation))
        os.kill(pid, signal.SIGSTOP)
        self.stops.append((wall_ms(), incarnation))
        self._stopped.add(pid)

        def resume() -> None:
            self._stopped.discard(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        return self._targets.life_s * self._dice.uniform(*LIFE_FACTOR), resume

    def _drain(self) -> None:
        with self._client() as client:
            serving = self._serving(client)
        if not serving:
            raise NoTarget
        incarnation, _, parent = self._dice.choice(serving)
        self._leaving.add(incarnation)
        parent.signal(signal.SIGTERM)

    def _kill_one(self, fleet: Fleet) -> None:
        self._kill_member(self._dice.choice(fleet.members))

    def _kill_member(self, member: Supervised) -> None:
        pid = member.pid
        member.signal(signal.SIGKILL)
        self._killed_ms[pid] = wall_ms()

    def _kill_sender(self) -> None:
        """Choose a sender: an rq worker process of `worker callbacks`."""
        members = [member for member in self._targets.callbacks.members if member.process.is_alive()]
        try:
            children = [child for member in members for child in psutil.Process(member.pid).children()]
            senders = [child for child in children if any("spawn_main" in part for part in child.cmdline())]
            self._dice.choice(senders).kill()
        except (psutil.NoSuchProcess, IndexError) as error:
            raise NoTarget from error

    # ------------------------------------------------------------ servers and links

    def _client(self) -> Any:  # Any: a redis-py client
        return self._targets.server.client()

    def _note_outage(self, name: str) -> None:
        self.outages.append((wall_ms(), name))

    def _restart(self, *, crash: bool) -> None:
        self._note_outage("restart")
        with suppress(TimeoutError):
            self._targets.server.restart(crash=crash)
        # With many jobs on a busy machine, loading its file takes longer than a test would wait.
        while not _is_executed(lambda: self._targets.server.client().ping()):
            time.sleep(RETRY_S)
        self._note_outage("restarted")

    def _slow(self) -> Undo:
        self._targets.weather.delay_s = self._dice.uniform(0.01, 0.2)
        return self._bad_weather(), lambda: setattr(self._targets.weather, "delay_s", 0.0)

    def _cut(self) -> Undo:
        self._targets.weather.is_cutting = True
        return self._bad_weather(), lambda: setattr(self._targets.weather, "is_cutting", False)

    def _bad_weather(self) -> float:
        """Draw and note how long the weather lasts."""
        lasts_s, now_ms = self._dice.uniform(2, 6), wall_ms()
        self.weather.append((now_ms, now_ms + round(lasts_s * 1000)))
        return lasts_s

    def _client_kill(self) -> None:
        # A worker does not reclaim for one lifetime after its own connection broke.
        self._note_outage("CLIENT KILL")
        with self._client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def _flush(self) -> None:
        with self._client() as client:
            client.script_flush()

    def _fill(self) -> Undo:
        """Set maxmemory below the usage: submits are refused."""
        with self._client() as client:
            client.config_set("maxmemory", "1mb")
        return self._dice.uniform(0.5, 2), self._give_memory

    def _give_memory(self) -> None:
        with self._client() as client:
            client.config_set("maxmemory", "0")

    def _lock_history(self) -> Undo:
        """Lock the database as another program would: writes fail for a while."""
        history = self._targets.history
        if not history.exists():
            raise NoTarget
        holder = sqlite3.connect(history, timeout=1, check_same_thread=False, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")

        def let_go() -> None:
            holder.execute("ROLLBACK")
            holder.close()

        return self._dice.uniform(4, 12), let_go


def is_kill(fault: str) -> bool:
    """Whether a process died by SIGKILL."""
    return "kill -9" in fault or "SIGKILL" in fault


def _is_executed(undo: Callable[[], object]) -> bool:
    """Return whether Redis executed it; Redis may be down."""
    try:
        undo()
    except (redis.ConnectionError, redis.TimeoutError):
        return False
    return True


class NoTarget(Exception):
    """There is no target for this fault now."""
