"""Submitting to a queue that is full: when there may be room, and waiting for it. Without I/O, as `commands.py`."""

from collections.abc import Callable, Sequence
from time import monotonic

from producer.commands import Chunk, Countdown, Operation, Pause, Queue, Receipt, SubmitAnswer, retry_after_s
from producer.contract.calls import NewJob
from producer.contract.keys import QueueKeys
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


ASKED_AGAIN_S = 1.0
"""Of many refusals in a row, the queue is asked for its pace at most this often."""


class Waits:
    """Tells the refusals among many answers when to try again, as a single job's is told. Changes: it remembers."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._guesses: dict[QueueKeys, tuple[float, float]] = {}

    def tell(self, chunk: Chunk, answers: Sequence[SubmitAnswer]) -> Operation[Sequence[SubmitAnswer]]:
        """The answers to a chunk, with `retry_after_s` of each refusal for fullness."""
        for made, answer in zip(chunk.jobs, answers, strict=True):
            if isinstance(answer, QueueFull) and isinstance(made, NewJob):
                answer.retry_after_s = yield from self._guess_s(self._queue.keys_of(made.id), answer)
        return answers

    def _guess_s(self, keys: QueueKeys, full: QueueFull) -> Operation[float]:
        asked_s, guess_s = self._guesses.get(keys, (float("-inf"), 0.0))
        if monotonic() - asked_s > ASKED_AGAIN_S:
            guess_s = yield from retry_after_s(keys, full)
            self._guesses[keys] = monotonic(), guess_s
        return guess_s
