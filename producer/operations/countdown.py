"""Time left of a timeout."""

from collections.abc import Generator
from dataclasses import replace
from time import monotonic
from typing import TypeVar

from sluice.producer.errors import ResultTimeout
from sluice.producer.operations.operation import Ask, Read, Reply, Step

Event = TypeVar("Event")
Result = TypeVar("Result")


class Countdown:
    """The remaining time of a timeout; None means no timeout."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._begin_s = monotonic()

    @property
    def passed_s(self) -> float:
        """Time since the start, in seconds."""
        return monotonic() - self._begin_s

    def check(self, subject: str) -> None:
        """Raise if the timeout has passed; the message begins with the `subject`.

        Raises:
            ResultTimeout: the timeout has passed.
        """
        if self.timeout_s is not None and self.passed_s >= self.timeout_s:
            raise ResultTimeout(
                f"{subject} not ended after {self.timeout_s:g} s; the job continues. Call again to keep waiting."
            )

    def block_ms(self, most_ms: int) -> int:
        """Return how long to block, in ms: the time left, at most `most_ms`, at least 1 (0 would block forever)."""
        if self.timeout_s is None:
            return most_ms
        return max(1, min(most_ms, round((self.timeout_s - self.passed_s) * 1000)))


def within(
    timeout_s: float | None, operation: Generator[Step | Event, list[Reply], Result]
) -> Generator[Step | Event, list[Reply], Result]:
    """Run an operation whose round trips end at the timeout (`Ask.deadline_s`), however long the client retries.

    Raises:
        ResultTimeout: the server did not answer in time.
    """
    if timeout_s is None:
        return (yield from operation)
    deadline_s = monotonic() + timeout_s
    try:
        request = next(operation)
        while True:
            try:
                replies = yield _with_deadline(request, deadline_s)
            except BaseException as error:  # noqa: BLE001  # the operation decides
                request = operation.throw(error)
            else:
                request = operation.send(replies)
    except StopIteration as stop:
        return stop.value


def _with_deadline(request: Step | Event, deadline_s: float) -> Step | Event:
    match request:
        case Ask():
            return replace(request, deadline_s=deadline_s)
        case Read():
            return request._replace(deadline_s=deadline_s)
        case _:
            return request
