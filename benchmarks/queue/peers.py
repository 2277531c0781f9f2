"""Throughput of the queue, jobs submitted and drained per second, compared with other queues.

    python -m benchmarks queue [--jobs 20000] [--rounds 3] [--peers all|none|NAME,NAME]
        [--sections jobs,wakes,streams]

Everything is real: redis-server with its append-only file synced every second on a unix socket, one per run; the client
libraries; worker processes. A no-op job has a payload of 16 bytes (ours asks the null model for one token). Runs of
ours and of the peers alternate; medians are printed. `burst` drains without a recorder, so the outbox grows;
`sustained` ends when every job has its row in SQLite. Peers are installed at first use: `benchmarks/peers`.

`wakes` prints how long an idle worker of ours takes from before a submit to the first step of its job.
`streams` prints the cost of a streamed token: jobs of 200 tokens at 10 ms a step, all running at once.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TypeVar

from benchmarks.peers import queue_side
from benchmarks.processes import version_of_server
from benchmarks.queue.ours import TOKENS, Drained, Streamed, drain, stream
from benchmarks.queue.wakes import wakes_ms
from benchmarks.tables import table
from sluice.history.percentiles import percentile

Drain = Callable[[int, int], Drained]
"""Of so many jobs by so many workers."""

Figures = TypeVar("Figures", Drained, Streamed)
SECTIONS = ("jobs", "wakes", "streams")


def median(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure separately."""

    def of(name: str) -> float | None:
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        return statistics.median(values) if values else None

    kind = type(runs[0])
    return kind(**{field.name: of(field.name) for field in fields(kind)})


def jobs_table(drains: Mapping[str, Drain], num_jobs: int, num_rounds: int) -> str:
    """Return the table of speeds."""
    runs: dict[tuple[str, int], list[Drained]] = {(name, count): [] for name in drains for count in (1, 2)}
    for _ in range(num_rounds):
        for name, count in runs:
            try:
                runs[name, count].append(drains[name](num_jobs, count))
            except RuntimeError as error:
                print(f"{name}: a run is left out: {error}", file=sys.stderr, flush=True)
    head = (
        "queue", "submit/s", "done/s", "done/s, two", "rows/s", "commands a job", "submit us: client", "server",
        "drain us: worker", "server",
    )  # fmt: skip
    ran = [name for name in drains if runs[name, 1] and runs[name, 2]]
    return table([head, *(_row(name, median(runs[name, 1]), median(runs[name, 2])) for name in ran)])


def _row(name: str, one: Drained, two: Drained) -> list[str]:
    figures = (one.submitted_per_s, one.done_per_s, two.done_per_s, one.recorded_per_s)
    per_job = (one.client_us_per_submit, one.server_us_per_submit, one.worker_us_per_job, one.server_us_per_job)
    rates = ["" if figure is None else f"{figure:,.0f}" for figure in figures]
    return [name, *rates, f"{one.commands_per_job:.1f}", *(f"{us:.0f}" for us in per_job)]


def wakes_table(num_wakes: int) -> str:
    """Return the wake-up of an idle worker."""
    taken_ms = wakes_ms(num_wakes)
    figures = (f"{percentile(taken_ms, 50):.2f}", f"{percentile(taken_ms, 99):.2f}")
    return table([("wake-ups", "p50 ms", "p99 ms"), (f"{num_wakes}", *figures)])


def streams_table(num_rounds: int, counts: Sequence[int], intervals_s: Sequence[float], tokens: int) -> str:
    """Return the cost of tokens."""
    cases = [(count, interval_s) for count in counts for interval_s in intervals_s]
    rounds = [[stream(count, interval_s, tokens=tokens) for count, interval_s in cases] for _ in range(num_rounds)]
    rows = [("streams at once", "every ms", "tokens/s", "worker us a token", "server us a token")]
    for (count, interval_s), *runs in zip(cases, *rounds, strict=True):
        figures = median(runs)
        costs = (f"{figures.worker_us_per_token:.1f}", f"{figures.server_us_per_token:.1f}")
        rows.append((f"{count}", f"{1000 * interval_s:.0f}", f"{figures.tokens_per_s:,.0f}", *costs))
    return table(rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs of each run (default 20000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median is printed (default 3)")
    parser.add_argument("--peers", default="none", help="all, none, or names with commas (default none)")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)} (default all)")
    parser.add_argument("--wakes", type=int, default=300, help="jobs that wake an idle worker (default 300)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each job that streams")
    parser.add_argument("--streams", default="64,256", help="how many jobs stream at once (default 64,256)")
    parser.add_argument("--intervals", default="0,0.02,0.05", help="seconds between rounds (default 0,0.02,0.05)")
    given = parser.parse_args()
    shorthands: dict[str, list[str]] = {"all": list(queue_side.RECIPES), "none": []}
    peers = shorthands.get(given.peers, given.peers.split(","))
    drains: dict[str, Drain] = {"ours, burst": drain, "ours, sustained": partial(drain, with_history=True)}
    drains |= {name: partial(queue_side.drain, name) for name in peers}
    print(f"{version_of_server()}, load {os.getloadavg()[0]:.1f} before the start\n", flush=True)
    if "jobs" in given.sections.split(","):
        print(jobs_table(drains, given.jobs, given.rounds), flush=True)
    if "wakes" in given.sections.split(","):
        print(f"\n{wakes_table(given.wakes)}", flush=True)
    if "streams" in given.sections.split(","):
        counts, intervals_s = map(int, given.streams.split(",")), map(float, given.intervals.split(","))
        print(f"\n{streams_table(given.rounds, list(counts), list(intervals_s), given.tokens)}")


if __name__ == "__main__":
    main()
