"""The throughput of this worker while it is full, in the tokens that jobs reserve. No I/O, no clock.

The unit is that of the backlog (`protocol/scaling`). A job counts with what it uses as it uses it, and when it
is done with the rest of its reservation too, so that in all it has counted with its cost.
"""

from collections.abc import Iterable

from sluice.protocol.states import JobState
from sluice.worker.jobs.held_job import HeldJob

WINDOW_S = 5.0
"""Length of one measurement."""

WEIGHT = 0.3
"""Weight of a new measurement against those before."""


class Capacity:
    """A measurement of a worker's capacity. Changes with each sample.

    In a window at whose heartbeats jobs waited for room, the worker was full: its rate is a measurement, and moves the
    mean. In any other, the rate is only a lower bound, and can raise the mean but not lower it. Neither
    moves it at once: many jobs may end in one window.
    """

    def __init__(self) -> None:
        self._ended_tokens = 0
        self._has_backlog = False
        self._began_s: float | None = None
        self._began_tokens = 0
        self._is_full = True
        self._has_news = False
        self.tokens_per_s: float | None = None
        """Reserved tokens a second; None until a job has made progress."""

    def end(self, job: HeldJob, state: JobState) -> None:
        """Count a job that has ended here: one that is done with all that it reserved."""
        self._ended_tokens += job.leased.cost if state is JobState.DONE else job.used_tokens

    def note_backlog(self, *, has_backlog: bool) -> None:
        """Note whether jobs wait although this worker pulls, as the last heartbeat says."""
        self._has_backlog = has_backlog

    def sample(self, now_s: float, held: Iterable[HeldJob]) -> None:
        """Look at the jobs that the worker holds; once a window is over, update the rate."""
        tokens = self._ended_tokens + sum(job.used_tokens for job in held)
        self._is_full = self._is_full and self._has_backlog
        if self._began_s is not None:
            if now_s - self._began_s < WINDOW_S:
                return
            # A job that was lost or returned takes what it had counted with it.
            self._update(max(0.0, (tokens - self._began_tokens) / (now_s - self._began_s)))
        self._began_s, self._began_tokens, self._is_full = now_s, tokens, self._has_backlog

    def take_news(self) -> float | None:
        """Return the rate once after each window that had one."""
        has_news, self._has_news = self._has_news, False
        return self.tokens_per_s if has_news else None

    def _update(self, rate: float) -> None:
        before = self.tokens_per_s
        if before is None:
            self.tokens_per_s = rate or None
        elif self._is_full or rate > before:
            self.tokens_per_s = before + WEIGHT * (rate - before)
        self._has_news = self.tokens_per_s is not None
