"""Submitting to a queue that is full: wait for room, as long as the caller likes. Without I/O, as `commands.py`."""

from collections.abc import Callable

from producer.commands import Countdown, Operation, Pause, Receipt
from producer.errors import QueueFull

MAX_PAUSE_S = 2.0
"""Looked at again after this long at the latest: the guess at when there is room may be too high."""


def submit_within(wait_s: float, attempt: Callable[[], Operation[Receipt]]) -> Operation[Receipt]:
    """Submit, and while the queue is full, again after the time that its refusal suggests.

    Raises:
        QueueFull: there was no room within `wait_s`; the job was not submitted.
        ProducerError: as `attempt` does.
    """
    clock = Countdown(wait_s)
    while True:
        try:
            return (yield from attempt())
        except QueueFull as full:
            left_s = wait_s - clock.passed_s
            if left_s <= 0:
                raise
            pause_s = min(full.retry_after_s, left_s, MAX_PAUSE_S)
        yield Pause(pause_s)
