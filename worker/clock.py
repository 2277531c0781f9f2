"""Two clocks: one for durations, and the server's for what is stored. The second is mapped from the first."""

import time


def monotonic_s() -> float:
    """Seconds for durations; comparable with the engine's clock."""
    return time.monotonic()


def wall_ms() -> int:
    """This machine's wall clock in milliseconds, for what is no time of a job; those are the server's."""
    return time.time_ns() // 1_000_000


class ServerClock:
    """The server's wall clock, read without asking it. Changes with each reply that carries the server's time.

    A reply's time is taken to be the middle of its round trip; of two readings the one with the shorter trip is kept,
    until it is a minute old (clocks drift).
    """

    _KEEP_S = 60.0

    def __init__(self) -> None:
        self._offset_ms = time.time() * 1000 - monotonic_s() * 1000
        self._trip_s = float("inf")
        self._read_at_s = float("-inf")

    def read(self, server_ms: int, *, sent_s: float, received_s: float) -> None:
        """Learn from a reply: `server_ms` was true between `sent_s` and `received_s`."""
        trip_s = received_s - sent_s
        if trip_s > self._trip_s and received_s - self._read_at_s < self._KEEP_S:
            return
        # Whole milliseconds are cut off by the server: half of one is missing on average.
        self._offset_ms = server_ms + 0.5 - (sent_s + received_s) * 500
        self._trip_s, self._read_at_s = trip_s, received_s

    def ms(self, at_s: float) -> int:
        """The server's wall clock at `at_s` of the monotonic clock, in milliseconds."""
        return int(at_s * 1000 + self._offset_ms)

    @property
    def skew_s(self) -> float:
        """How far this machine's wall clock is ahead of the server's."""
        return time.time() - (monotonic_s() * 1000 + self._offset_ms) / 1000
