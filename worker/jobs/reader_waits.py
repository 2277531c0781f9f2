"""How long the readers of one choice wait for its tokens. No I/O, no clock.

A reader waits from one entry of a channel to the next. Tokens that are generated while Redis is unreachable reach it
late and all at once, so the times at which tokens are sampled do not show an outage.
"""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class ReaderWaits:
    """The waits of one choice. Changes when tokens are published. Times are of the monotonic clock."""

    is_streamed: bool = True
    """False: readers expect tokens from each checkpoint on, not from the entry before."""

    since_s: float | None = None
    """Since when readers wait for the next entry; None while they expect none."""

    longest_s: float | None = None
    """Longest wait of this attempt; None before its second entry."""

    earlier_s: float = 0.0
    """Longest wait of earlier attempts, by the times in their entries."""

    def expect(self, since_s: float) -> None:
        """Let readers wait since this time, unless they wait already."""
        if self.since_s is None:
            self.since_s = since_s

    def end(self, now_s: float) -> None:
        """End the wait: readers have the tokens."""
        self.longest_s = self.longest_at(now_s)
        self.since_s = now_s if self.is_streamed else None

    def longest_at(self, now_s: float) -> float | None:
        """Return the longest wait of this attempt if the present one ends now."""
        if self.since_s is None:
            return self.longest_s
        return max(self.longest_s or 0.0, now_s - self.since_s)

    def replay(self, gap_ms: float) -> None:
        """Count the time between two entries of earlier attempts."""
        if self.is_streamed:
            self.earlier_s = max(self.earlier_s, gap_ms / 1000)
