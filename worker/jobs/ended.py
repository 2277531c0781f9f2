"""Jobs that ended in this worker, for the thread that releases the chains that wait for them."""

import threading
from collections import deque

MAX_KEPT = 1024
"""Ends that wait for that thread; it finds others by its looks, which take turns."""


class EndedJobs:
    """The ids of jobs that have ended here since the last `take`. Thread-safe; changes with every call."""

    def __init__(self) -> None:
        self._ids = deque[str](maxlen=MAX_KEPT)
        self._wakes = threading.Event()

    def note(self, job_id: str) -> None:
        """Add a job that has ended."""
        self._ids.append(job_id)
        if not self._wakes.is_set():
            self._wakes.set()

    def wake(self) -> None:
        """Let `take` return."""
        self._wakes.set()

    def take(self, timeout_s: float) -> list[str]:
        """Return the jobs that have ended; wait at most this long for one."""
        self._wakes.wait(max(0.0, timeout_s))
        self._wakes.clear()
        return [self._ids.popleft() for _ in range(len(self._ids))]
