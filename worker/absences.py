"""Partitions whose server does not answer: left out of what the others do until they are back. Knows no jobs.

Each is asked on a thread of its own, with a connection of its own, so that its time-outs delay no other.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from producer.contract.keys import QueueKeys
from producer.contract.running import longer_delay_s
from worker.connections import Client
from worker.health import Patience, RedisHealth


@dataclass(slots=True, eq=False)
class _Absence:
    """One partition that failed once or more. Changes until it answers."""

    patience: Patience = field(default_factory=Patience)
    is_away: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


class Absences:
    """Who is away. Any thread may ask and tell."""

    def __init__(self, open_client: Callable[[], Client], health: RedisHealth, wake: Callable[[], None]) -> None:
        self._open_client = open_client
        self._health = health
        self._wake = wake
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._known: dict[QueueKeys, _Absence] = {}
        self._clients: dict[QueueKeys, Client] = {}

    def __contains__(self, keys: object) -> bool:
        absence = self._known.get(keys) if isinstance(keys, QueueKeys) else None
        return absence is not None and absence.is_away

    def failed(self, keys: QueueKeys, error: RedisError | OSError) -> None:
        """It did not answer: it is away until a pause, longer each time, is over and it answers a question.

        Raises:
            RedisError: the same kind of reply has come too often; it is our error.
        """
        self._health.failed(f"partition {keys.partition}", error)
        with self._lock:
            absence = self._known.setdefault(keys, _Absence())
            if absence.is_away or self._closing.is_set():
                return
            delay_s = absence.patience.after(error)
            absence.is_away = True
        threading.Thread(target=self._ask, args=(keys, delay_s), name="absence", daemon=True).start()

    def answered(self, keys: QueueKeys) -> None:
        """It did all that it was asked to."""
        if keys not in self._known:
            return
        with self._lock:
            absence = self._known.get(keys)
            if absence is None or absence.is_away:
                return
            del self._known[keys]
        self._health.answered(f"partition {keys.partition}")

    def when_back(self, keys: QueueKeys, act: Callable[[], None]) -> None:
        """Do something once it is not away; now, if it is not."""
        with self._lock:
            absence = self._known.get(keys)
            if absence is not None and absence.is_away:
                absence.waiting.append(act)
                return
        act()

    def stop(self) -> None:
        """Ask no more; nobody is away from now on."""
        self._closing.set()
        for keys in list(self._known):
            self._back(keys)

    def _ask(self, keys: QueueKeys, delay_s: float) -> None:
        while not self._closing.wait(delay_s) and not self._is_there(keys):
            delay_s = longer_delay_s(delay_s)
        self._back(keys)

    def _is_there(self, keys: QueueKeys) -> bool:
        if keys not in self._clients:
            self._clients[keys] = self._open_client()
        try:
            self._clients[keys].execute_command("EXISTS", keys.bell)
        except (RedisConnectionError, RedisTimeoutError, OSError):
            return False
        except RedisError:
            return True  # it speaks: whoever has something to do there finds out
        return True

    def _back(self, keys: QueueKeys) -> None:
        with self._lock:
            absence = self._known.get(keys, _Absence())
            absence.is_away = False
            waiting, absence.waiting = absence.waiting, []
        for act in waiting:
            act()
        self._wake()
