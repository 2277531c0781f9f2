"""A thread that looks at the queues of a group, and beats for the members whose workers are not there.

Without a heartbeat a model is unknown: gateways refuse its name, and clients are told that no worker serves the queue.
So the fleet sends one for each member without the device, in its own process, with the state in which it is. Such a
heartbeat holds no jobs and pulls none; with it the thread calls `maintain`, so that jobs still expire in time.
"""

import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from redis.exceptions import RedisError

from sluice.protocol.calls import Beat, beat, give_back, maintain
from sluice.protocol.offers import FIELD
from sluice.protocol.redis.execution import run
from sluice.protocol.workers import LOADING
from sluice.version import installed_version
from sluice.worker.clock import monotonic_s
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.clients import Client, connect
from sluice.worker.endpoints import partitions_of
from sluice.worker.errors import ConfigError
from sluice.worker.log import Log
from sluice.worker.processes.turns.observed import Seen, look_at_queue

TIMEOUT_S = 1.0
"""Time for a connection, and for a reply."""

LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A member whose queue is looked at."""

    model: str
    """The name by which producers request it."""

    config: WorkerConfig


class Stand:
    """The heartbeat for a member that is away. Changes as it comes and goes."""

    def __init__(self, member: Watched) -> None:
        self._member = member
        self._partitions = partitions_of(member.config)
        self._incarnation: str | None = None
        self._since_ms = 0
        self.is_unserved = True
        """Whether no worker of the queue was there at the last look."""

        self.offer: str | None = None
        """What its worker last offered."""

    def turn(self, client: Client, state: str | None) -> None:
        """Beat with a state; without one, deregister once the worker beats itself, so that the model stays known.

        Raises:
            RedisError, OSError: the server does not answer.
        """
        if state is None and (self._incarnation is None or not self.is_unserved):
            self.leave(client)
            return
        if self._incarnation is None:
            # Once deregistered, an incarnation stays so.
            self._incarnation, self._since_ms = uuid.uuid4().hex, time.time_ns() // 10**6
        for keys in self._partitions:
            expiry_ms = int(self._member.config.beat.life_s * 1000)
            about = self._about(state or LOADING)
            run(client, beat(keys, _empty_beat(self._incarnation, expiry_ms, about)))
            run(client, maintain(keys, incarnation=self._incarnation))

    def note(self, seen: Seen) -> None:
        """Note what was seen of its queue."""
        self.is_unserved = seen.is_unserved
        self.offer = next(iter(seen.offers.get(self._member.model, ())), self.offer)

    def leave(self, client: Client) -> None:
        """Deregister, if it has beaten.

        Raises:
            RedisError, OSError: the server does not answer.
        """
        if self._incarnation is not None:
            for keys in self._partitions:
                run(client, give_back(keys, self._incarnation, [], deregister=True))
            self._incarnation = None

    def _about(self, state: str) -> dict[str, str]:
        config = self._member.config
        # No process id: the fleet's is not to be signalled in its place.
        return {
            "host": socket.gethostname(),
            "name": config.log.name or "-",
            "version": installed_version(),
            "device": config.model.device,
            "model": self._member.model,
            "discipline": config.batching.discipline,
            "started_ms": str(self._since_ms),
            "state": state,
            **dict.fromkeys(("held", "places", "running", "waiting"), "0"),
            **({} if self.offer is None else {FIELD: self.offer}),
        }


def _empty_beat(incarnation: str, expiry_ms: int, about: Mapping[str, str]) -> Beat:
    return Beat(incarnation=incarnation, held=(), processed_pull=0, expiry_ms=expiry_ms, about=about)


class Watch:
    """The thread of a group. The fleet states who is away, and reads what was seen."""

    def __init__(self, url: str, members: Mapping[str, Watched], log: Log) -> None:
        """Look at nothing yet. `members` by their names in the file."""
        self._url = url
        self._members = members
        self._log = log
        self._stands = {name: Stand(member) for name, member in members.items()}
        self._states: Mapping[str, str | None] = {}
        self._seen: Mapping[str, Seen] = {}
        self._is_away = False
        self._closing, self._woken = threading.Event(), threading.Event()
        self._every_s = min([LOOK_EVERY_S, *(member.config.beat.every_s for member in members.values())])
        self._thread = threading.Thread(target=self._run, name="turns", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Deregister those that are away, and end the thread."""
        self._closing.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._try(self._leave)

    def state(self, states: Mapping[str, str | None]) -> None:
        """State which members are away, and how; None: the member's worker beats itself."""
        self._states = dict(states)
        self._woken.set()

    @property
    def seen(self) -> Mapping[str, Seen]:
        """What was seen of each queue at the last look, which was answered; empty before the first."""
        return self._seen

    def _run(self) -> None:
        while not self._closing.is_set():
            self._woken.clear()
            self._try(self._turn)
            self._woken.wait(self._every_s)

    def _try(self, act: Callable[[Client], None]) -> None:
        try:
            client = connect(self._url, timeout_s=TIMEOUT_S)
            try:
                act(client)
            finally:
                client.connection_pool.disconnect()
        except (ConfigError, RedisError, OSError) as error:
            if not self._is_away:
                self._log.warning("redis unreachable; the model on the device stays", error=str(error))
            self._is_away = True
            return
        if self._is_away:
            self._log.info("redis reachable again")
        self._is_away = False

    def _turn(self, client: Client) -> None:
        states, seen = self._states, dict[str, Seen]()
        for name, member in self._members.items():
            stand = self._stands[name]
            stand.turn(client, states.get(name))
            at_s, queue = monotonic_s(), member.config.queue.names[0]
            seen[name] = look_at_queue(client, queue, partitions_of(member.config), at_s)
            stand.note(seen[name])
        self._seen = seen

    def _leave(self, client: Client) -> None:
        for stand in self._stands.values():
            stand.leave(client)
