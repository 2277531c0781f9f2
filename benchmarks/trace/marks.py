"""Trace marks: when each stage of a step ran and on which thread, wrapped around functions from outside."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

PROCESS = 1_000_000
"""Our process in the trace, next to the profiler's own."""

Event = dict[str, Any]  # as in the trace event format, which is JSON


class Span(NamedTuple):
    """One run of one stage."""

    name: str
    thread: str
    began_ns: int
    """By time.perf_counter_ns, as is the end."""

    ended_ns: int


class Place(NamedTuple):
    """A function that is a stage, and where its callers find it."""

    owner: Any  # a class or a module
    attribute: str
    name: str


class Marks:
    """Completed spans of all threads."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def on(self, places: Sequence[Place]) -> Iterator[None]:
        """Mark these functions for the duration of the context."""
        before = [getattr(place.owner, place.attribute) for place in places]
        for place, function in zip(places, before, strict=True):
            setattr(place.owner, place.attribute, self._marked(place.name, function))
        try:
            yield
        finally:
            for place, function in zip(places, before, strict=True):
                setattr(place.owner, place.attribute, function)

    def _marked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def marked(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - handed through
            began_ns = time.perf_counter_ns()
            try:
                return function(*arguments, **options)
            finally:
                # Appending to a list is atomic.
                self.spans.append(Span(name, threading.current_thread().name, began_ns, time.perf_counter_ns()))

        return marked


def events_of(spans: Sequence[Span], *, zero_ns: int) -> list[Event]:
    """Return the spans as complete events, one row per thread; times from `zero_ns` on, in microseconds."""
    threads = list(dict.fromkeys(span.thread for span in spans))
    rows = {thread: row for row, thread in enumerate(threads, start=1)}
    named: list[Event] = [_name("process_name", 0, "Sluice: steps, stages, queue")]
    named += [_name("thread_name", row, thread) for thread, row in rows.items()]
    return named + [
        {
            "ph": "X",
            "cat": "sluice",
            "name": span.name,
            "pid": PROCESS,
            "tid": rows[span.thread],
            "ts": (span.began_ns - zero_ns) / 1000,
            "dur": (span.ended_ns - span.began_ns) / 1000,
        }
        for span in spans
    ]


def _name(kind: str, row: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": row, "args": {"name": name}}
