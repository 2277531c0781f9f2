"""A day's arrivals, compressed: chats that follow the hours, and a nightly run of long jobs. No I/O."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

PROMPT_TOKENS = 20
CHAT_TOKENS, BULK_TOKENS = 40, 240
"""Output tokens of a job. Both are below the queue's reserve (256), so that the backlog has their real size."""

CHATS_PER_HOUR = (0, 0, 0, 0, 0, 0, 10, 40, 90, 160, 190, 200, 190, 90, 170, 190, 180, 150, 60, 110, 130, 60, 10, 0)
"""Chats of each hour. Nothing comes from four to six: the workers may all leave."""

BULK_AT_HOUR, BULK_JOBS = 1.0, 150
"""The nightly run, submitted at once."""

HOURS = 24


@dataclass(frozen=True, slots=True)
class Arrival:
    """One job."""

    at_s: float
    """After the beginning of the day."""

    output_tokens: int

    @property
    def cost(self) -> int:
        """What it reserves."""
        return PROMPT_TOKENS + self.output_tokens


def day(length_s: float, seed: int = 1) -> list[Arrival]:
    """Return the jobs of a day that is compressed to `length_s`, in their order."""
    dice, hour_s = random.Random(seed), length_s / HOURS
    jobs = [Arrival(at_s, CHAT_TOKENS) for at_s in _chats(dice, hour_s)]
    jobs += [Arrival(BULK_AT_HOUR * hour_s, BULK_TOKENS)] * BULK_JOBS
    return sorted(jobs, key=lambda job: job.at_s)


def _chats(dice: random.Random, hour_s: float) -> Iterator[float]:
    """Yield the times of chats: each hour's number, at random within the hour."""
    for hour, count in enumerate(CHATS_PER_HOUR):
        yield from ((hour + dice.random()) * hour_s for _ in range(count))


def jobs_per_worker(jobs: list[Arrival], tokens_per_s: float, within_s: float) -> int:
    """Return the number of jobs of the day's mean size that one worker gets through in time."""
    mean_cost = sum(job.cost for job in jobs) / len(jobs)
    return max(1, math.floor(tokens_per_s * within_s / mean_cost))
