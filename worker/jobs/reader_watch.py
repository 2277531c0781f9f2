"""Whether anybody reads channels, by the reads that the servers count. No I/O, no clock.

A reader writes nothing, and Redis does not report who waits at a key. But only readers send XREAD, and a server counts
those that it has answered. A reader that waits is answered with each entry, so the count rises with what is published
if, and only if, it is read; also by a reader of another queue on the same server.
"""

from collections.abc import Hashable

KEPT_S = 1.0
"""Readers count as there for this long after the last sign of one."""

COUNT_EVERY_S = 0.4
UNREAD_COUNT_EVERY_S = 0.1
"""How often to count, at most, with and without readers."""


class ReaderWatch:
    """The counts of each partition's server, and when one rose. Changes with each count. Times are monotonic."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, int] = {}
        self._seen_s = self._counted_s = float("-inf")

    def are_there(self, now_s: float) -> bool:
        """Return whether channels are read, as far as the counts tell."""
        return not self._counts or now_s - self._seen_s < KEPT_S

    def is_due(self, now_s: float) -> bool:
        """Return whether to count with the next round trip."""
        return now_s - self._counted_s >= (COUNT_EVERY_S if self.are_there(now_s) else UNREAD_COUNT_EVERY_S)

    def note(self, partition: Hashable, count: int | None, now_s: float) -> None:
        """Take a partition's count; None if its server does not report it: it may be read."""
        self._counted_s = now_s
        # A lower count means that the server was restarted: readers come back.
        if count is None or count != self._counts.get(partition):
            self._seen_s = now_s
        self._counts[partition] = -1 if count is None else count
