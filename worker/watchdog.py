"""The deadline of the engine's present step. Its loop writes it; other threads read whether it has passed."""

from collections.abc import Callable

from sluice.worker.clock import monotonic_s

SLOWER_BY = 5.0
"""A step may take this many times as long as the slowest remembered one."""

_FORGET = 0.99
"""Share of the slowest step that is remembered after each further step."""


class Watchdog:
    """A context manager around one step at a time: `is_overdue` while the step is past its deadline."""

    def __init__(self, min_deadline_s: float, clock: Callable[[], float] = monotonic_s) -> None:
        """Start without a deadline. `min_deadline_s` is the least time that every step has."""
        self._min_deadline_s = min_deadline_s
        self._clock = clock
        self._slowest_s = 0.0
        self._busy_s = 0.0
        self._began_s = 0.0
        self._deadline_s = float("inf")

    def __enter__(self) -> None:
        """Set the deadline of a step that begins now."""
        self.begin()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """End the step; after an error the deadline stands, because a shutdown can hang as well."""
        if error is None:
            self.end()

    def begin(self) -> None:
        """Set the deadline of a step that begins now."""
        self._began_s = self._clock()
        self._deadline_s = self._began_s + max(self._min_deadline_s, SLOWER_BY * self._slowest_s)

    def end(self) -> None:
        """End the step."""
        self._deadline_s = float("inf")
        took_s = self._clock() - self._began_s
        self._busy_s += took_s
        self._slowest_s = max(took_s, self._slowest_s * _FORGET)

    @property
    def busy_s(self) -> float:
        """Seconds spent in steps since the start."""
        return self._busy_s

    @property
    def is_overdue(self) -> bool:
        """Whether the present step is past its deadline."""
        return self._clock() > self._deadline_s
