"""Observe both servers from outside, over sockets in the file system: no fault of the network reaches the observer."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import redis

from tests.integration.jobs import KEYS
from tests.servers import RedisServer

EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a server."""

    at_s: float
    server: str
    is_primary: bool
    num_ended: int


class Observer:
    """A thread that looks at each server twenty times a second. Mutable."""

    def __init__(self, servers: dict[str, RedisServer]) -> None:
        self.samples: list[Sample] = []
        self._clients: dict[str, Any] = {name: server.client() for name, server in servers.items()}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._observe, name="observer", daemon=True)
        self._thread.start()

    def _observe(self) -> None:
        while not self._is_over.wait(EVERY_S):
            for name, client in self._clients.items():
                try:
                    role, *_ = client.execute_command("ROLE")
                    counts = client.hmget(KEYS.key("counters"), "done", "failed", "cancelled", "expired")
                except redis.RedisError:
                    continue
                num_ended = sum(int(count or 0) for count in counts)
                self.samples.append(Sample(time.monotonic(), name, role == b"master", num_ended))

    def stop(self) -> None:
        """Stop it."""
        self._is_over.set()
        self._thread.join()
        for client in self._clients.values():
            client.close()

    # ------------------------------------------------------------ what it saw

    def promoted_after_s(self, server: str, began_s: float, until_s: float) -> float | None:
        """Seconds from a fault to the promotion of what is the primary in the end; None if it was it before, too."""
        seen = [one for one in self.samples if one.server == server]
        was_primary = [one.is_primary for one in seen if one.at_s < began_s]
        if not was_primary or was_primary[-1]:
            return None
        return next((one.at_s - began_s for one in seen if began_s <= one.at_s <= until_s and one.is_primary), None)

    def ends_s(self, server: str) -> list[float]:
        """When a server had counted one more end or several, by the monotonic clock."""
        found, num_ended = list[float](), -1
        for one in self.samples:
            if one.server == server and one.num_ended != num_ended:
                found.append(one.at_s)
                num_ended = one.num_ended
        return found


def longest_pause_s(times_s: Sequence[float], began_s: float, until_s: float) -> float:
    """The longest time between two of these times, or between one and the begin or the end."""
    within = [began_s, *(at_s for at_s in times_s if began_s <= at_s <= until_s), until_s]
    return max(later - earlier for earlier, later in pairwise(within))
