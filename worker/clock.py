"""Clocks: a monotonic one for durations, and the server's wall clock for stored times, mapped from the first."""

import time

monotonic_s = time.monotonic
"""The monotonic clock in seconds, comparable with the engine's clock."""


class ServerClock:
    """An estimate of the server's wall clock. Changes with each reply that carries the server's time.

    A reply's time is assumed to be the middle of its round trip. The reading with the shortest round trip is kept until
    it is a minute old, because clocks drift.
    """

    _KEEP_S = 60.0

    def __init__(self) -> None:
        self._offset_ms = time.time() * 1000 - monotonic_s() * 1000
        self._trip_s = float("inf")
        self._read_at_s = float("-inf")

    def read(self, server_ms: int, *, sent_s: float, received_s: float) -> None:
        """Update the estimate: the server's time was `server_ms` between `sent_s` and `received_s`."""
        trip_s = received_s - sent_s
        if trip_s > self._trip_s and received_s - self._read_at_s < self._KEEP_S:
            return
        # The server truncates to milliseconds, which loses half of one on average.
        self._offset_ms = server_ms + 0.5 - (sent_s + received_s) * 500
        self._trip_s, self._read_at_s = trip_s, received_s

    def ms(self, at_s: float) -> int:
        """Return the server's wall clock, in milliseconds, at `at_s` of the monotonic clock."""
        return int(at_s * 1000 + self._offset_ms)
