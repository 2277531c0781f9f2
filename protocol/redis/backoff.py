"""Exponential backoff between retries. Used by producers and workers."""

import random

FIRST_DELAY_S = 0.02
MAX_DELAY_S = 1.0


class Backoff:
    """Delays between retries: each is twice the previous one, up to a limit. Changes with each retry."""

    def __init__(self, first_s: float = FIRST_DELAY_S, longest_s: float = MAX_DELAY_S, *, jitter: float = 0.0) -> None:
        """`jitter`: random share of a delay, 0 to 1."""
        self._first_s, self._longest_s, self._jitter = first_s, longest_s, jitter
        self._delay_s = first_s

    def next_delay_s(self) -> float:
        """Return the delay before the next try, in seconds."""
        delay_s = self._delay_s * random.uniform(1 - self._jitter, 1.0)
        self._delay_s = min(self._delay_s * 2, self._longest_s)
        return delay_s

    def reset(self) -> None:
        """Start over after a success."""
        self._delay_s = self._first_s
