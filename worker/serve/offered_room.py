"""The engine's room, less the requests on their way to it. Knows no threads: the mailbox has the lock."""

from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence

from sluice.engine.request import NO_ROOM, Room

MOST_PULL_S = 0.1
"""Longer pulls count as this long: a server that hangs."""

_KEEP = 0.8


class OfferedRoom:
    """The room that pulls may still use. Mutable."""

    def __init__(self) -> None:
        self._stated = NO_ROOM
        self._coming: dict[str, Room] = {}
        self._handed: deque[str] = deque()
        """Requests that the engine has taken and that its room may not count, oldest first."""

        self.pull_s = 0.0
        """What a pull takes until its last request is ready for the engine: of late, the longest."""

        self._timed: tuple[str, float] | None = None

    def state(self, room: Room, num_uncounted: int) -> bool:
        """Note the engine's room, which counts all requests handed to it but the last `num_uncounted`.

        Return whether the puller must know at once: there is more free room, or from now on none.
        """
        while len(self._handed) > num_uncounted:
            self._coming.pop(self._handed.popleft(), None)
        before, self._stated = self._stated, room
        if room.over_class is not None or before.over_class is not None:
            return room.over_class != before.over_class
        return (
            room.kv_tokens > before.kv_tokens
            or room.prefill_tokens > before.prefill_tokens
            or room.sequences > before.sequences
            or room.num_coming < before.num_coming
        )

    def expect(self, coming: Sequence[tuple[str, Room]], asked_s: float | None) -> None:
        """Count requests as on their way to the engine, each with the room that it will take, since `asked_s`.

        Without it, how long they take says nothing of others.
        """
        self._coming.update(coming)
        if coming and asked_s is not None and self._timed is None:
            self._timed = coming[-1][0], asked_s

    def note_ready(self, request_ids: Container[str], now_s: float) -> None:
        """Note that the loop can take requests."""
        if self._timed is not None and self._timed[0] in request_ids:
            took_s, self._timed = now_s - self._timed[1], None
            self.pull_s = min(MOST_PULL_S, max(took_s, _KEEP * self.pull_s + (1 - _KEEP) * took_s))

    def hand(self, request_ids: Iterable[str]) -> None:
        """Note that the engine takes requests: they are on their way until a room counts them."""
        self._handed.extend(request_ids)

    def forget(self, request_ids: Collection[str]) -> bool:
        """Stop counting requests as on their way; return whether that frees room."""
        if self._timed is not None and self._timed[0] in request_ids:
            self._timed = None
        gone = [self._coming.pop(request_id, None) for request_id in request_ids]
        return any(gone)

    def is_coming(self, request_id: str) -> bool:
        """Return whether a request is on its way to the engine, or not yet counted in its room."""
        return request_id in self._coming

    def free(self) -> Room:
        """Return the stated room, less the requests on their way."""
        stated, coming = self._stated, self._coming.values()
        return Room(
            kv_tokens=max(0, stated.kv_tokens - sum(request.kv_tokens for request in coming)),
            prefill_tokens=max(0, stated.prefill_tokens - sum(request.prefill_tokens for request in coming)),
            sequences=max(0, stated.sequences - sum(request.sequences for request in coming)),
            over_class=stated.over_class,
            num_coming=stated.num_coming,
        )
