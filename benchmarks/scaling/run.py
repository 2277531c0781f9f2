"""Workers that follow the backlog in tokens, compared with workers that follow the number of jobs.

    python -m benchmarks scaling [--minutes 4] [--workers 4] [--within 8] [--late 20]

A day's arrivals (chats by day, long jobs by night), compressed, go to `worker fleet` with the null model: real worker
processes that are started and drained, with an embedded server, a recorder into SQLite and an audit at the end. Both
fleets have the same bounds. The one that follows the number of jobs is told how many jobs of the day's mean size one
worker gets through in time, which nobody knows before a day is over.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.scaling.day import PROMPT_TOKENS, Arrival, day, jobs_per_worker
from benchmarks.service.parts import num_done, own_server, percentile, wait_until
from sluice.producer.client import Producer

SEQUENCES, STEP_S = 8, 0.02
"""Of one worker: eight jobs at a time, each 50 tokens a second."""

LOOK_EVERY_S = 0.1
NUM_WARM_UP = 300
"""Jobs before the day, by which a worker measures itself."""


@dataclass(slots=True, eq=False)
class Processes:
    """The worker processes of a fleet. Changes as it is looked at."""

    pid: int
    worker_s: float = 0.0
    most: int = 0
    seen: set[int] = field(default_factory=set[int])
    """Process ids of all workers so far."""

    _over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Count until `stop`."""
        before_s = time.monotonic()
        while not self._over.wait(LOOK_EVERY_S):
            now_s = time.monotonic()
            alive = [child.pid for child in psutil.Process(self.pid).children() if _is_worker(child)]
            self.worker_s += len(alive) * (now_s - before_s)
            self.most, before_s = max(self.most, len(alive)), now_s
            self.seen.update(alive)

    def begin(self) -> None:
        """Forget what was counted so far. No worker runs."""
        self.worker_s, self.most, self.seen = 0.0, 0, set()

    def stop(self) -> None:
        """Stop counting."""
        self._over.set()


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "--incarnation" in process.cmdline()
    except psutil.Error:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one fleet did with the day."""

    follows: str
    delays_s: Sequence[float]
    """From submit to end, of each job that is done."""

    submitted: int
    processes: Processes
    audit: int
    """Exit code of `worker audit`: 0 if queue and history agree on every job."""

    rate: float
    """Reserved tokens a second of one worker that is full, as it measured itself before the day."""

    def row(self, late_s: float) -> str:
        """Return its row of the table."""
        late = sum(delay_s > late_s for delay_s in self.delays_s)
        p50, p95, p100 = (percentile(self.delays_s, percent) for percent in (50, 95, 100))
        cells = [
            self.follows, self.submitted, len(self.delays_s), late, f"{p50:.1f}", f"{p95:.1f}", f"{p100:.1f}",
            f"{self.processes.worker_s:.0f}", self.processes.most, len(self.processes.seen),
            "agrees" if self.audit == 0 else f"code {self.audit}",
        ]  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


HEADER = (
    "| follows | jobs | done | late | p50 s | p95 s | max s | worker-seconds | most workers | starts | audit |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


@contextmanager
def fleet(folder: Path, *options: str, num_workers: int, within_s: float) -> Iterator[Processes]:
    """Run a fleet; drained at the end."""
    model = f"null?step_s={STEP_S}"
    command = [
        sys.executable, "-P", "-m", "sluice.worker", "fleet", *options, "--processes", str(num_workers), "--within",
        str(within_s), "--scale-in-after", str(within_s / 2), "--model", model, "--max-num-seqs", str(SEQUENCES),
        "--metrics-port", "0",
    ]  # fmt: skip
    with (folder / "fleet.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        processes = Processes(process.pid)
        watching = threading.Thread(target=processes.watch)
        watching.start()
        try:
            yield processes
        finally:
            processes.stop()
            watching.join()
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def submit_day(producer: Producer, jobs: Sequence[Arrival]) -> list[str]:
    """Submit each job at its time; return their ids."""
    began_s, ids = time.monotonic(), list[str]()
    for job in jobs:
        time.sleep(max(0.0, began_s + job.at_s - time.monotonic()))
        options = {"max_tokens": job.output_tokens, "ignore_eos": True}
        ids.append(producer.submit(list(range(PROMPT_TOKENS)), **options).id)
    return ids


def warm_up(producer: Producer, jobs: Sequence[Arrival]) -> None:
    """Run some of the day's jobs and wait until no worker is left, as on the evening before: it has left its rate."""
    step = len(jobs) // NUM_WARM_UP
    ids = submit_day(producer, [Arrival(0.0, job.output_tokens) for job in jobs[::step]])
    wait_until_idle(producer, len(ids))


def wait_until_idle(producer: Producer, num_jobs: int) -> None:
    """Wait until so many jobs are done and every worker has left."""
    wait_until(lambda: num_done(producer) == num_jobs, "all jobs to be done", every_s=0.5)
    wait_until(lambda: not producer.queue()[0].workers, "the workers to leave", every_s=0.2)


def run_day(follows: str, jobs: Sequence[Arrival], *options: str, num_workers: int, within_s: float) -> Outcome:
    """Let one fleet follow the day, then wait until every job has ended and no worker is left."""
    with (
        own_server() as folder,
        Producer() as producer,
        fleet(folder, *options, num_workers=num_workers, within_s=within_s) as processes,
    ):
        warm_up(producer, jobs)
        num_before, rate = num_done(producer), float(producer.queue()[0].settings["capacity"])
        processes.begin()
        ids = submit_day(producer, jobs)
        wait_until_idle(producer, num_before + len(ids))
        views = [producer.status(one) for one in ids]
        audit = subprocess.run(
            [sys.executable, "-P", "-m", "sluice.worker", "audit"], env=os.environ, stdout=sys.stderr, check=False
        ).returncode
    delays_s = [(view.ended_ms - view.submitted_ms) / 1000 for view in views if view.ended_ms is not None]
    return Outcome(follows=follows, delays_s=delays_s, submitted=len(ids), processes=processes, audit=audit, rate=rate)


def main() -> None:
    """Run both fleets and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="length of the compressed day")
    parser.add_argument("--workers", type=int, default=4, help="most workers; the least is 0")
    parser.add_argument("--within", type=float, default=8.0, help="seconds to clear the backlog")
    parser.add_argument("--late", type=float, default=20.0, help="a job is late when it ends so many seconds later")
    asked = parser.parse_args()
    jobs, bounds = day(60 * asked.minutes), {"num_workers": asked.workers, "within_s": asked.within}
    by_tokens = run_day("backlog in tokens", jobs, "--scale-to-backlog", **bounds)
    per_worker = jobs_per_worker(jobs, by_tokens.rate, asked.within)
    by_jobs = run_day("number of jobs", jobs, "--scale-to-jobs", str(per_worker), **bounds)
    print(f"{len(jobs)} jobs, {sum(job.cost for job in jobs)} reserved tokens, in {60 * asked.minutes:g} s")
    print(f"one worker: {by_tokens.rate:.0f} tokens/s; {per_worker} jobs of the mean size in {asked.within:g} s")
    print(HEADER, by_tokens.row(asked.late), by_jobs.row(asked.late), sep="\n")
