"""Waits on the queue's bell, so that an idle worker wakes the moment something may have become ready.

A thread with a connection of its own: it blocks in XREAD from the id that the last pull returned, takes nothing, and
wakes the exchange. It listens only when asked, once each time, so a busy worker does not hear every submit.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from redis.exceptions import RedisError

from producer.contract.keys import QueueKeys
from worker.connections import Client
from worker.errors import PartDied

BLOCK_MS = 500
FIRST_DELAY_S = 0.05
MAX_DELAY_S = 1.0


class Bell:
    """One listener for all partitions of a queue."""

    def __init__(self, client: Client, ring: Callable[[], None], died: Callable[[PartDied], None]) -> None:
        self._client = client
        self._ring = ring
        self._died = died
        self._asked = threading.Condition()
        self._after: dict[QueueKeys, str] | None = None
        self._rung: dict[QueueKeys, str] = {}
        self._is_listening = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="bell", daemon=True)

    def start(self) -> None:
        """Begin, without listening yet."""
        self._thread.start()

    def quiet(self) -> None:
        """Nothing to do: the exchange asks no more."""

    def stop(self) -> None:
        """End the thread; a block under way is broken off."""
        with self._asked:
            self._is_closing = True
            self._asked.notify()
        self._client.connection_pool.disconnect(inuse_connections=True)
        if self._thread.ident is not None:
            self._thread.join()

    def listen(self, after: Mapping[QueueKeys, str]) -> None:
        """Ring at the first entry after these ids, which the last pulls returned. Does nothing while it listens."""
        with self._asked:
            if not self._is_listening:
                self._is_listening = True
                self._after = dict(after)
                self._asked.notify()

    def rung(self) -> list[tuple[QueueKeys, str]]:
        """Bells that rang since the last call, each with its newest id."""
        with self._asked:
            rung, self._rung = list(self._rung.items()), {}
            return rung

    def _run(self) -> None:
        try:
            while (after := self._next()) is not None:
                self._wait_for(after)
        except Exception as error:  # noqa: BLE001  # whatever it is, the loop must hear of it
            if not self._is_closing:
                self._died(PartDied("bell", error))

    def _next(self) -> dict[QueueKeys, str] | None:
        with self._asked:
            while self._after is None and not self._is_closing:
                self._asked.wait()
            after, self._after = self._after, None
            return None if self._is_closing else after

    def _wait_for(self, after: dict[QueueKeys, str]) -> None:
        """Block until one of the bells rings; Redis away is the exchange's to notice."""
        names = {keys.key("bell").encode(): keys for keys in after}
        delay_s = FIRST_DELAY_S
        rung: dict[QueueKeys, str] = {}
        while not rung and not self._is_closing:
            try:
                rung = self._read({keys.key("bell"): last for keys, last in after.items()}, names)
            except (RedisError, OSError):
                with self._asked:
                    self._asked.wait(delay_s)
                delay_s = min(delay_s * 2, MAX_DELAY_S)
        with self._asked:
            self._rung.update(rung)
            self._is_listening = False
        self._ring()

    def _read(self, after: dict[str, str], names: Mapping[bytes, QueueKeys]) -> dict[QueueKeys, str]:
        reply: Any = self._client.xread(after, block=BLOCK_MS)  # redis-py's replies are untyped
        return {names[name]: entries[-1][0].decode() for name, entries in reply or ()}
