"""Offer ten times a worker's capacity for some minutes and measure memory and latency. Exit code 1 if not flat.

python -m tests.chaos.overload --minutes 10
python -m tests.chaos.overload --minutes 60 --without-sql   a worker's capacity, during an SQL outage
"""

import argparse
import math
import statistics
import sys
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from sluice.history.database import open_database
from sluice.producer.client import Producer
from sluice.producer.errors import QueueFull
from sluice.producer.operations.submission import Receipt
from sluice.protocol.calls import QueueSettings
from tests.end_to_end.processes import WorkerProcess, worker_pool
from tests.integration.jobs import KEYS, wait_until
from tests.servers import RedisServer, redis_server

FACTOR = 10
PROMPT = "tell me more"
TOKENS = 20
STEP_S = 0.01
SEQUENCES = 16
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
    jobs_per_s: float
    counts: Counter[str] = field(default_factory=Counter[str])
    last_refusal: QueueFull | None = None
    slowest_call_s: float = 0.0
    accepted_ids: list[str] = field(default_factory=list[str])

    def run(self, stopping: threading.Event) -> None:
        """So many jobs each period, accepted or not."""
        at_once, next_s = math.ceil(self.jobs_per_s * PERIOD_S), time.monotonic()
        while not stopping.wait(max(0.0, next_s - time.monotonic())):
            next_s = max(next_s + at_once / self.jobs_per_s, time.monotonic() - 1)
            self._submit(at_once)

    def _submit(self, number: int) -> None:
        began_s = time.monotonic()
        for answer in self.producer.submit_many([PROMPT] * number, max_tokens=TOKENS):
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

    at_s: float
    """Since the flood began."""

    accepted: int
    refused: int
    redis_bytes: int
    worker_bytes: int
    recorder_bytes: int
    waiting_jobs: int
    outbox: int


Of = Callable[[Sample], int]
MEMORY: Mapping[str, Of] = {
    "Redis": lambda sample: sample.redis_bytes,
    "worker": lambda sample: sample.worker_bytes,
    "recorder": lambda sample: sample.recorder_bytes,
}
"""In bytes; of processes the resident set."""


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
    _began_s: float = 0.0

    def run(self, seconds: float, every_s: float, say: Callable[[str], object]) -> None:
        """Flood for so long, and look now and then."""
        with self.flooding():
            self.watch(seconds, every_s, say)

    @contextmanager
    def flooding(self) -> Generator[None]:
        """Jobs are offered meanwhile."""
        stopping, self._began_s = threading.Event(), time.monotonic()
        thread = threading.Thread(target=self.flood.run, args=(stopping,), daemon=True)
        thread.start()
        try:
            yield
            assert thread.is_alive(), "the flood ended by itself"
        finally:
            stopping.set()
            thread.join()
        self.seconds = time.monotonic() - self._began_s

    def watch(
        self,
        seconds: float,
        every_s: float,
        say: Callable[[str], object],
        *,
        until: Callable[[Sample], bool] = lambda _sample: False,
    ) -> list[Sample]:
        """Sample periodically for at most this long; return the samples."""
        seen: list[Sample] = []
        ends_s = time.monotonic() + seconds
        with self.server.client() as client:
            while time.monotonic() < ends_s and not (seen and until(seen[-1])):
                time.sleep(every_s)
                seen.append(self._look(client))
                say(str(seen[-1]))
        self.samples += seen
        return seen

    def _look(self, client: Any) -> Sample:  # Any: a redis-py client
        counts = self.flood.counts.copy()
        return Sample(
            at_s=round(time.monotonic() - self._began_s, 1),
            accepted=counts["accepted"],
            refused=counts.total() - counts["accepted"],
            redis_bytes=int(client.info("memory")["used_memory"]),
            worker_bytes=psutil.Process(self.worker.pid).memory_info().rss,
            recorder_bytes=_memory_of(self.worker.pids_of("recorder")[-1:]),
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

        The seconds are the machine's; the number is the queue's: no job waits for more than the queue takes.
        """
        query = "SELECT submitted_ms, finished_ms FROM jobs WHERE state = 'done' AND output_tokens = :tokens"
        engine = open_database(self.database_url)
        with engine.connect() as connection:
            rows = [(row[0], row[1]) for row in connection.execute(sa.text(query), {"tokens": TOKENS})]
        engine.dispose()
        ends = sorted(finished_ms for _, finished_ms in rows)
        ahead = [bisect_left(ends, finished) - bisect_right(ends, submitted) for submitted, finished in rows]
        return sorted((finished - submitted) / 1000 for submitted, finished in rows), max(ahead, default=0)


def _memory_of(pids: Iterable[int]) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


def growth(samples: Sequence[Sample], of: Of) -> tuple[float, float]:
    """Mean of the second quarter and of the last one: the first is for filling up."""
    used = [of(sample) for sample in samples]
    quarter = len(used) // 4
    return statistics.fmean(used[quarter : 2 * quarter]), statistics.fmean(used[-quarter:])


def is_flat(samples: Sequence[Sample], of: Of) -> bool:
    """Whether no more is used at the end than was used once all was full."""
    before, after = growth(samples, of)
    return after <= before * MAX_GROWTH + SLACK_BYTES


@contextmanager
def overloaded(
    folder: Path,
    *,
    database_url: str | None = None,
    max_outbox_entries: int | None = None,
    step_s: float = STEP_S,
    factor: float = FACTOR,
    **settings: str,
) -> Generator[Overload]:
    """Start a worker with a bounded queue; the flood will offer `factor` times its capacity.

    Capacity: all sequences running, each step at its minimum duration.
    """
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
        url = database_url or f"sqlite:///{folder}/history.db"
        usual = {"RECORDER": "true", "DATABASE_URL": url, "BEAT_EVERY_S": "1", "BEAT_LIFE_S": "4"}
        model = {"MODEL": f"null?step_s={step_s}", "MAX_NUM_SEQS": str(SEQUENCES)}
        [worker] = stack.enter_context(worker_pool(server.url, folder, WorkerProcess)).start_all(
            1, **{**usual, **model, **settings}
        )
        if "RECORDER" not in settings:
            worker.wait_for_line("recorder started")
        flood = Flood(producer, factor * SEQUENCES / step_s / TOKENS)
        yield Overload(server, worker, producer, url, flood)


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
    """Return a readable report, and whether every bound held."""
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
    for name, of in MEMORY.items():
        before, after = growth(load.samples, of)
        lines.append(f"memory of {name}: {before / 2**20:.1f} MiB once full, {after / 2**20:.1f} MiB at the end")
    return lines, most_ahead <= MAX_AHEAD and all(is_flat(load.samples, of) for of in MEMORY.values())


def overload(minutes: float) -> tuple[list[str], bool]:
    """Offer ten times a worker's capacity, with readers that stop reading."""
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder, overloaded(Path(folder)) as load:
        long_one = load.producer.submit("a long one", max_tokens=8000)
        with readers_that_stop(load.server.url, [long_one.id] * READERS):
            load.run(minutes * 60, max(1.0, minutes), say)
        load.wait_until_idle()
        return report(load)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Flood, print, and say by the exit code."""
    parser = argparse.ArgumentParser(description="Offer ten times what a worker can do.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--without-sql", action="store_true", help="offer what it can do; SQL is away for so long")
    given = parser.parse_args()
    if given.without_sql:
        # Only this run needs PostgreSQL.
        from tests.chaos.faults.sql_outage import without_sql

        lines, is_well = without_sql(given.minutes * 60)
    else:
        lines, is_well = overload(given.minutes)
    say("\n".join([*lines, "as promised" if is_well else "NOT AS PROMISED"]))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
