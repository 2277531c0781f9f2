"""Ten times more than a worker can do, for as long as is asked: what memory and latency do. Exit code 1 if not flat.

python -m tests.chaos.overload --minutes 10
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from producer.client import Producer
from producer.commands import Receipt
from producer.contract.calls import QueueSettings
from producer.errors import QueueFull
from tests.end_to_end.processes import WorkerProcess, crew
from tests.integration.jobs import KEYS, wait_until
from tests.servers import RedisServer, redis_server

FACTOR = 10
TOKENS = 20
STEP_S = 0.01
SEQUENCES = 16
CAPACITY_JOBS_PER_S = SEQUENCES / STEP_S / TOKENS
"""What the worker could do at best: all its places full, each step as short as it may be."""

MAX_WAITING_JOBS = 200
MAX_AHEAD = MAX_WAITING_JOBS + 2 * SEQUENCES
"""What waits and what runs when a job is accepted; and what began after it and ended in the same step."""

RESULT_KEPT_MS = 4000
CHANNEL_KEPT_MS = 2000
PERIOD_S = 0.05
MAX_GROWTH = 1.10
SLACK_BYTES = 4 * 2**20
READERS = 20


@dataclass(slots=True, eq=False)
class Flood:
    """Submits without waiting for anything but the answers. Changes as it goes."""

    producer: Producer
    counts: Counter[str] = field(default_factory=Counter[str])
    last_refusal: QueueFull | None = None
    slowest_call_s: float = 0.0
    accepted_ids: list[str] = field(default_factory=list[str])

    def run(self, stopping: threading.Event) -> None:
        """So many jobs each period, accepted or not."""
        at_once, next_s = round(FACTOR * CAPACITY_JOBS_PER_S * PERIOD_S), time.monotonic()
        while not stopping.wait(max(0.0, next_s - time.monotonic())):
            next_s = max(next_s + PERIOD_S, time.monotonic() - 1)
            self._submit(at_once)

    def _submit(self, number: int) -> None:
        began_s = time.monotonic()
        for answer in self.producer.submit_many(["tell me more"] * number, max_tokens=TOKENS):
            if isinstance(answer, Receipt):
                self.counts["accepted"] += 1
                self.accepted_ids.append(answer.id)
            elif isinstance(answer, QueueFull):
                self.counts[f"refused ({answer.reason})"] += 1
                self.last_refusal = answer
            else:
                raise answer
        self.slowest_call_s = max(self.slowest_call_s, time.monotonic() - began_s)


@dataclass(frozen=True, slots=True)
class Sample:
    """How much is used at one time."""

    redis_bytes: int
    worker_bytes: int
    waiting_jobs: int
    outbox: int


@dataclass(slots=True, eq=False)
class Overload:
    """A worker, its server, its history, and a flood. Filled as it goes."""

    server: RedisServer
    worker: WorkerProcess
    producer: Producer
    database_url: str
    flood: Flood
    samples: list[Sample] = field(default_factory=list[Sample])
    seconds: float = 0.0

    def run(self, seconds: float, every_s: float, say: Callable[[str], object]) -> None:
        """Flood for so long, and look now and then."""
        stopping, began_s = threading.Event(), time.monotonic()
        thread = threading.Thread(target=self.flood.run, args=(stopping,), daemon=True)
        thread.start()
        with self.server.client() as client:
            while time.monotonic() < began_s + seconds and thread.is_alive():
                time.sleep(every_s)
                self.samples.append(self._look(client))
                say(f"{time.monotonic() - began_s:5.0f} s: {self.samples[-1]}, {dict(self.flood.counts)}")
        stopping.set()
        thread.join()
        self.seconds = time.monotonic() - began_s

    def _look(self, client: Any) -> Sample:  # Any: a redis-py client
        return Sample(
            redis_bytes=int(client.info("memory")["used_memory"]),
            worker_bytes=psutil.Process(self.worker.process.pid).memory_info().rss,
            waiting_jobs=int(client.hget(KEYS.key("counters"), "waiting_jobs") or 0),
            outbox=int(client.xlen(KEYS.outbox)),
        )

    def wait_until_idle(self) -> None:
        """Every accepted job has ended and is recorded."""
        with self.server.client() as client:
            counters = KEYS.key("counters")
            wait_until(
                lambda: all(int(n or 0) == 0 for n in client.hmget(counters, "waiting_jobs", "running_jobs")),
                "all has ended",
                patience_s=60,
            )
            wait_until(lambda: client.xlen(KEYS.outbox) == 0, "all is recorded", patience_s=60)

    def waits(self) -> tuple[list[float], int]:
        """Of the flood's jobs that were done: seconds from submit to end, and most others that ended in between.

        The seconds are the machine's; the number is the queue's: nobody waits for more than the queue takes.
        """
        query = "SELECT submitted_ms, finished_ms FROM jobs WHERE state = 'done' AND output_tokens = :tokens"
        engine = sa.create_engine(self.database_url)
        with engine.connect() as connection:
            rows = [(row[0], row[1]) for row in connection.execute(sa.text(query), {"tokens": TOKENS})]
        engine.dispose()
        ends = sorted(finished_ms for _, finished_ms in rows)
        ahead = [bisect_left(ends, finished) - bisect_right(ends, submitted) for submitted, finished in rows]
        return sorted((finished - submitted) / 1000 for submitted, finished in rows), max(ahead, default=0)

    def growth(self, of: Callable[[Sample], int]) -> tuple[float, float]:
        """Mean of the second quarter and of the last one: the first is for filling up."""
        used = [of(sample) for sample in self.samples]
        quarter = len(used) // 4
        return statistics.fmean(used[quarter : 2 * quarter]), statistics.fmean(used[-quarter:])

    def is_flat(self, of: Callable[[Sample], int]) -> bool:
        """Whether no more is used at the end than was used once all was full."""
        before, after = self.growth(of)
        return after <= before * MAX_GROWTH + SLACK_BYTES


@contextmanager
def overloaded(folder: Path, *, recorder: bool = True, max_outbox_entries: int | None = None) -> Generator[Overload]:
    """A worker with a bounded queue, before the flood."""
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        producer = stack.enter_context(Producer(server.url))
        producer.configure(
            QueueSettings(
                max_waiting_jobs=MAX_WAITING_JOBS,
                result_ttl_ms=RESULT_KEPT_MS,
                channel_ttl_ms=CHANNEL_KEPT_MS,
                max_outbox_entries=max_outbox_entries,
            )
        )
        database_url = f"sqlite:///{folder}/history.db"
        workers = stack.enter_context(crew(server.url, folder))
        [worker] = workers.start_all(
            1, MODEL=f"null?step_s={STEP_S}", MAX_NUM_SEQS=str(SEQUENCES), RECORDER=str(recorder).lower(),
            DATABASE_URL=database_url, BEAT_EVERY_S="1", BEAT_LIFE_S="4",
        )  # fmt: skip
        yield Overload(server, worker, producer, database_url, Flood(producer))


@contextmanager
def readers_that_stop(url: str, job_ids: Sequence[str]) -> Generator[None]:
    """Each reads one event of a job, and then nothing more, though its connection stays."""
    with ExitStack() as stack:
        for job_id in job_ids:
            producer = stack.enter_context(Producer(url))
            stream = producer.stream(job_id)
            next(stream, None)
            stack.callback(stream.close)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]  # a generator
        yield


def report(load: Overload) -> tuple[list[str], bool]:
    """Lines for people, and whether all is as promised."""
    (latencies, most_ahead), refusal = load.waits(), load.flood.last_refusal
    p50, p99 = (latencies[int(len(latencies) * share)] for share in (0.5, 0.99))
    offered = load.flood.counts.total()
    lines = [
        f"{offered} jobs offered in {load.seconds:.0f} s ({offered / load.seconds:.0f} a second), "
        f"{len(latencies)} done ({len(latencies) / load.seconds:.0f} a second): {offered / len(latencies):.1f} x",
        f"{dict(load.flood.counts)}; slowest call {load.flood.slowest_call_s:.2f} s",
        f"refusal: {refusal}; wait {refusal.retry_after_s if refusal else 0:.2f} s",
        f"latency of accepted jobs: p50 {p50:.2f} s, p99 {p99:.2f} s, longest {latencies[-1]:.2f} s; "
        f"at most {most_ahead} others ended before one that was accepted (bound {MAX_AHEAD})",
    ]
    memory = {"Redis": redis_bytes, "worker": worker_bytes}
    for name, of in memory.items():
        before, after = load.growth(of)
        lines.append(f"memory of {name}: {before / 2**20:.1f} MiB once full, {after / 2**20:.1f} MiB at the end")
    return lines, most_ahead <= MAX_AHEAD and all(load.is_flat(of) for of in memory.values())


def redis_bytes(sample: Sample) -> int:
    """Of the server."""
    return sample.redis_bytes


def worker_bytes(sample: Sample) -> int:
    """Resident, of the worker."""
    return sample.worker_bytes


def main() -> int:
    """Flood, print, and say by the exit code."""
    parser = argparse.ArgumentParser(description="Offer ten times what a worker can do.")
    parser.add_argument("--minutes", type=float, default=10.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder, overloaded(Path(folder)) as load:
        long_one = load.producer.submit("a long one", max_tokens=8000)
        with readers_that_stop(load.server.url, [long_one.id] * READERS):
            load.run(given.minutes * 60, max(1.0, given.minutes), _say)
        load.wait_until_idle()
        lines, is_well = report(load)
    _say("\n".join([*lines, "as promised" if is_well else "NOT AS PROMISED"]))
    return 0 if is_well else 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
