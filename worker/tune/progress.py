"""Progress of a search: the current stage, the share done, and an estimate of the remaining time."""

from collections.abc import Callable
from time import monotonic
from typing import TypeVar

Result = TypeVar("Result")

SAY_EVERY_S = 2.0


class ProgressReporter:
    """A writer of lines with `write`; without it, of nothing."""

    def __init__(self, write: Callable[[str], None] = lambda line: None) -> None:
        self._write = write

    def stage(self, what: str, num_parts: int, *, estimate_s: float | None = None) -> "Stage":
        """Begin a stage of `num_parts` parts, whose duration may be known before."""
        estimate = "" if estimate_s is None else f", about {_duration(estimate_s)}"
        self._write(f"{what}: 0 of {num_parts}{estimate}")
        return Stage(self._write, what, num_parts)


class Stage:
    """A stage whose parts take about the same time each. Changes with each part."""

    def __init__(self, write: Callable[[str], None], what: str, num_parts: int) -> None:
        self._write, self._what, self._num_parts = write, what, num_parts
        self._num_done, self._taken_s = 0, 0.0
        self._said_s = monotonic()

    def timed(self, part: Callable[[], Result]) -> Result:
        """Run a part, and report it unless the last report is recent."""
        began_s = monotonic()
        result = part()
        self._num_done += 1
        self._taken_s += monotonic() - began_s
        num_left = max(0, self._num_parts - self._num_done)
        if num_left and monotonic() >= self._said_s + SAY_EVERY_S:
            self._said_s = monotonic()
            left = _duration(num_left * self._taken_s / self._num_done)
            self._write(f"{self._what}: {self._num_done} of {self._num_parts}, about {left} left")
        return result


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
