"""The engine's room, less the requests on their way to it. Knows no threads: the mailbox has the lock."""

from collections import deque
from collections.abc import Iterable

from sluice.engine.request import NO_ROOM, Room


class OfferedRoom:
    """The room that pulls may still use. Mutable."""

    def __init__(self) -> None:
        self._stated = NO_ROOM
        self._coming: dict[str, Room] = {}
        self._handed: deque[str] = deque()
        """Requests that the engine has taken and that its room may not count, oldest first."""

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
        )

    def expect(self, coming: Iterable[tuple[str, Room]]) -> None:
        """Count requests as on their way to the engine, each with the room that it will take."""
        self._coming.update(coming)

    def hand(self, request_ids: Iterable[str]) -> None:
        """Note that the engine takes requests: they are on their way until a room counts them."""
        self._handed.extend(request_ids)

    def forget(self, request_ids: Iterable[str]) -> bool:
        """Stop counting requests as on their way; return whether that frees room."""
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
        )
