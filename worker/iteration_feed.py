"""Passes iterations from the loop to HTTP clients. Without a follower, the engine describes none."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from queue import Empty, Full, Queue

from sluice.engine.watching import Iteration, Watcher

MAX_KEPT = 1000
"""Iterations that wait for one follower; one that reads too slowly misses the next ones."""

LOOK_S = 1.0
"""Longest silence towards a follower, after which it is noticed that it has gone."""


class IterationFeed:
    """The followers of one engine. Mutable; any thread may follow."""

    def __init__(self, watch: Callable[[Watcher | None], None]) -> None:
        """Follow an engine by its `watch`."""
        self._watch = watch
        self._followers: list[Queue[Iteration]] = []
        self._lock = threading.Lock()

    @contextmanager
    def follow(self) -> Generator[Callable[[], Iteration | None]]:
        """Yield a function that returns the next iteration, or None if there is none for `LOOK_S`."""
        queue: Queue[Iteration] = Queue(MAX_KEPT)
        self._change(lambda: self._followers.append(queue))
        try:
            yield lambda: _next(queue)
        finally:
            self._change(lambda: self._followers.remove(queue))

    def _change(self, change: Callable[[], None]) -> None:
        with self._lock:
            was_watched = bool(self._followers)
            change()
            if was_watched != bool(self._followers):
                self._watch(self._put if self._followers else None)

    def _put(self, iteration: Iteration) -> None:
        for queue in tuple(self._followers):
            with suppress(Full):
                queue.put_nowait(iteration)


def _next(queue: "Queue[Iteration]") -> Iteration | None:
    try:
        return queue.get(timeout=LOOK_S)
    except Empty:
        return None
