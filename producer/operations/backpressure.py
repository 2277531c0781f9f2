"""Submit to a full queue: estimate when there is room, and wait for it. No I/O."""

from collections.abc import Callable, Sequence

from sluice.producer.errors import QueueFull
from sluice.producer.operations.countdown import Countdown
from sluice.producer.operations.operation import Operation, Sleep
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.submission import Receipt, SubmitAnswer, retry_after_s, submit_jobs
from sluice.protocol.calls import NewJob
from sluice.protocol.durability import DurabilityCheck
from sluice.protocol.jobs import Prepared
from sluice.protocol.waits import WaitCause, WaitNotifier, WaitReason

MAX_PAUSE_S = 2.0
"""Longest pause before the next attempt, because the estimate may be too high."""


def submit_within(wait_s: float, attempt: Callable[[], Operation[Receipt]], waits: WaitNotifier) -> Operation[Receipt]:
    """Submit; while the queue is full, wait as long as the error suggests, and try again. Report long waits.

    Raises:
        QueueFull: the queue had no room within `wait_s`; the job was not submitted.
        ProducerError: as `attempt` does.
    """
    clock = Countdown(wait_s)
    with waits.wait() as wait:
        while True:
            try:
                return (yield from attempt())
            except QueueFull as full:
                left_s = wait_s - clock.passed_s
                if left_s <= 0:
                    raise
                if wait.is_due:
                    wait.waits_for(no_room(full))
                pause_s = min(full.retry_after_s, left_s, MAX_PAUSE_S)
            yield Sleep(pause_s)


def no_room(full: QueueFull) -> WaitReason:
    """Return the reason for which a submit to a full queue waits."""
    how = "More workers empty it sooner; producer queues set raises its limits"
    return WaitReason(WaitCause.QUEUE_FULL, f"{str(full).rstrip('.')}. {how}")


def submit_estimated(
    queue: Queue, jobs: Sequence[Prepared], durability_check: DurabilityCheck
) -> Operation[list[SubmitAnswer]]:
    """Submit jobs as `submit_jobs` does; each QueueFull has its `retry_after_s`."""
    answers = yield from submit_jobs(queue, jobs, durability_check)
    for i, ((job, _), answer) in enumerate(zip(jobs, answers, strict=True)):
        if isinstance(answer, QueueFull) and isinstance(job, NewJob):
            answers[i] = answer.with_estimate((yield from retry_after_s(queue, job.id, answer)))
    return answers
