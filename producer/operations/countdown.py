"""Time left of a timeout."""

from time import monotonic

from sluice.producer.errors import ResultTimeout


class Countdown:
    """The time left of a timeout; None is no timeout."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._begin_s = monotonic()

    @property
    def passed_s(self) -> float:
        """Seconds since the start."""
        return monotonic() - self._begin_s

    def check(self, what: str) -> None:
        """Raise when the timeout has passed.

        Raises:
            ResultTimeout: it has.
        """
        if self.timeout_s is not None and self.passed_s >= self.timeout_s:
            raise ResultTimeout(
                f"{what} not ended after {self.timeout_s:g} s; the job continues. Call again to keep waiting."
            )

    def block_ms(self, most_ms: int) -> int:
        """Return how long to block: the time left, at most `most_ms`, at least 1 (0 would block forever)."""
        if self.timeout_s is None:
            return most_ms
        return max(1, min(most_ms, round((self.timeout_s - self.passed_s) * 1000)))
