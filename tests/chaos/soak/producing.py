"""One producer of a soak: `python -m tests.chaos.soak.producing …`, until SIGTERM. It journals what was acknowledged.

It submits through the public client and repeats with the same ids until all are acknowledged, during outages too.
"""

import argparse
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

from sluice.producer.client import Producer
from sluice.producer.errors import DurabilityRefused, LessDurable, ProducerError, QueueFull, QueueUnreachable
from sluice.producer.operations.submission import Receipt
from sluice.protocol.jobs import Job, Options
from sluice.protocol.wire import JobId
from tests.chaos.catalogue import Ask, Intent, JournalWriter, catalogue_of
from tests.integration.jobs import new_job_id

MAX_AT_ONCE = 16
JOBS_PER_BATCH = 200
TENANTS = ("ant", "bee", "cow", "dog")
CALLBACK_SHARE = 0.05
RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One job as it is submitted, and the states that it may end in."""

    intent: Intent
    job: Job
    is_cancelled: bool


class Shooter:
    """Draw random jobs. Mutable: its random state and its batch."""

    def __init__(self, asks: list[Ask], name: str, seed: int, callback_url: str | None = None) -> None:
        self._asks = asks
        self._callback_url = callback_url
        self._name = name
        self._dice = random.Random(seed)
        self._num_drawn = 0

    def volley(self) -> list[Shot]:
        """Return the jobs of one volley."""
        return [self._draw() for _ in range(self._dice.randrange(1, MAX_AT_ONCE + 1))]

    def pause_s(self, jobs: int, jobs_per_s: float) -> float:
        """Wait for the next volley."""
        return self._dice.expovariate(1.0) * jobs / jobs_per_s

    def _draw(self) -> Shot:
        ask, kind = self._dice.randrange(len(self._asks)), self._dice.random()
        tenant = self._dice.choice(TENANTS)
        job_id = new_job_id(tenant)
        batch = f"{self._name}-{self._num_drawn // JOBS_PER_BATCH}" if kind > 0.5 else None
        self._num_drawn += 1
        own: Options = {
            "job_id": job_id,
            "tenant": tenant,
            "batch": batch,
            "stream": self._dice.random() < 0.8,
            "priority": self._dice.randrange(3),
            "callback_url": self._callback_url if self._dice.random() < CALLBACK_SHARE else None,
        }
        ends, is_cancelled = self._fate(kind, own, job_id)
        wants_callback = own.get("callback_url") is not None
        intent = Intent(asked=job_id, ask=ask, ends=ends, batch=batch, callback=wants_callback)
        return Shot(intent=intent, job=self._asks[ask].job(**own), is_cancelled=is_cancelled)

    def _fate(self, kind: float, own: Options, job_id: JobId) -> tuple[tuple[str, ...], bool]:
        """One in ten has a time limit, a delay, a key, or is cancelled."""
        if kind < 0.02:
            return ("done", "cancelled"), True
        if kind < 0.04:
            own["ttl_s"] = self._dice.uniform(0.05, 5)
            return ("done", "expired"), False
        if kind < 0.06:
            own["deadline"] = timedelta(seconds=self._dice.uniform(0.05, 5))
            return ("done", "expired"), False
        if kind < 0.08:
            own["not_before"] = timedelta(seconds=self._dice.uniform(0.05, 3))
        elif kind < 0.1:
            own["idempotency_key"] = f"key-{job_id}"
        return ("done",), False


def shoot(producer: Producer, shots: list[Shot], journal: JournalWriter) -> None:
    """Submit until all are acknowledged at the client's level. A lost reply changes nothing: the ids are the same."""
    journal.intend(shot.intent for shot in shots)
    left = {shot.intent.asked: shot for shot in shots}
    while left:
        wait_s = _submit(producer, left, journal)
        if left:
            time.sleep(wait_s)
    if cancelled := [JobId(shot.intent.asked) for shot in shots if shot.is_cancelled]:
        producer.cancel_many(cancelled)


def _submit(producer: Producer, left: dict[str, Shot], journal: JournalWriter) -> float:
    """Submit all that are left, remove those that are acknowledged; return the seconds until the next try."""
    wait_s = RETRY_S
    with suppress(QueueUnreachable, QueueFull, DurabilityRefused):
        for job_id, answer in zip(list(left), _submitted(producer, list(left.values())), strict=True):
            if isinstance(answer, Receipt):
                journal.acknowledge([job_id])
                del left[job_id]
            elif isinstance(answer, QueueFull):
                wait_s = min(1.0, answer.retry_after_s)
            elif not isinstance(answer, LessDurable):
                raise answer
    return wait_s


def _submitted(producer: Producer, shots: list[Shot]) -> Iterator[Receipt | ProducerError]:
    return producer.submit_many(shot.job for shot in shots)


def main() -> int:
    """Produce until SIGTERM."""
    given = _arguments()
    stopping = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    shooter = Shooter(catalogue_of(given.catalogue), given.name, given.seed, given.callback_url)
    client = Producer(given.redis_url, patience_s=20, durability=given.durability)
    with client as producer, JournalWriter(given.journal) as journal:
        while not stopping.is_set():
            shots = shooter.volley()
            try:
                shoot(producer, shots, journal)
            except QueueUnreachable:
                # The cancel may not have arrived: the job may end either way.
                continue
            stopping.wait(shooter.pause_s(len(shots), given.jobs_per_s))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Submit jobs until SIGTERM.")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--callback-url", help="of jobs that want a callback; without it, none does")
    parser.add_argument("--durability", help="level at which a submit counts as acknowledged; the queue's by default")
    parser.add_argument("--catalogue", required=True, help="seed:size:max_tokens of the asks")
    parser.add_argument("--jobs-per-s", type=float, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
