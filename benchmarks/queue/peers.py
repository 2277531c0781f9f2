"""Throughput of the queue, jobs submitted and drained per second, compared with other queues.

    python -m benchmarks queue [--jobs 20000] [--rounds 3] [--peers all|none|NAME,NAME] [--sections jobs,kill,streams]

Everything is real: redis-server with its append-only file synced every second on a unix socket, one per run; the client
libraries; worker processes. A no-op job has a payload of 16 bytes (ours asks the null model for one token). Runs of
ours and of the peers alternate; medians are printed. `burst` drains without a recorder, so the outbox grows;
`sustained` ends when every job has its row in SQLite. Peers are installed at first use: `benchmarks/peers`.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from benchmarks.peers import queue_side
from benchmarks.queue import ours as queue_ours
from benchmarks.queue import streams as queue_streams
from benchmarks.queue.figures import Drained, Killed
from benchmarks.queue.plain_server import version_of_server
from benchmarks.service.parts import percentile

KILLED_JOBS, KILL_WITHIN_S = 2_000, 90.0
OURS = "ours, burst"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the first table."""

    name: str
    one: Callable[[int], Drained]
    two: Callable[[int], Drained]
    wakes_ms: Callable[[int], list[float]] | None
    kill: Callable[[], Killed] | None


def our_rows() -> list[Row]:
    """Ours: without history, and with it."""

    def kill() -> Killed:
        return queue_ours.kill(KILLED_JOBS, KILL_WITHIN_S)

    def sustained(num_jobs: int, num_workers: int) -> Drained:
        return queue_ours.drain(num_jobs, num_workers, with_history=True)

    return [
        Row(OURS, queue_ours.drain, lambda n: queue_ours.drain(n, 2), queue_ours.wakes_ms, kill),
        Row("ours, sustained", lambda n: sustained(n, 1), lambda n: sustained(n, 2), None, None),
    ]


def peer_row(name: str) -> Row:
    """One peer."""
    return Row(
        name,
        lambda n: queue_side.drain(name, n, 1),
        lambda n: queue_side.drain(name, n, 2),
        lambda n: queue_side.wakes_ms(name, n),
        lambda: queue_side.kill(name, KILLED_JOBS, KILL_WITHIN_S),
    )


def median(runs: Sequence[Drained]) -> Drained:
    """Return the median of each figure separately."""

    def of(name: str) -> float | None:
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        return statistics.median(values) if values else None

    return Drained(**{field.name: of(field.name) for field in fields(Drained)})  # pyright: ignore[reportArgumentType]


def print_jobs(rows: Sequence[Row], num_jobs: int, num_rounds: int, num_wakes: int) -> None:
    """Print the table of speeds."""
    ones: dict[str, list[Drained]] = {row.name: [] for row in rows}
    twos: dict[str, list[Drained]] = {row.name: [] for row in rows}
    for _ in range(num_rounds):
        for row in rows:
            for runs, drain in ((ones, row.one), (twos, row.two)):
                try:
                    runs[row.name].append(drain(num_jobs))
                except RuntimeError as error:
                    print(f"{row.name}: a run is left out: {error}", file=sys.stderr, flush=True)
    print(f"{'':37} {'':>8} {'idle wake-up':>14} {'commands':>8} {'processor us: submit':>21} {'drain':>13}")
    print(
        f"{'queue':16} {'submit/s':>9} {'done/s':>8} {'two':>8} {'rows/s':>8} {'p50 ms':>6} {'p99 ms':>7} "
        f"{'per job':>8} {'client':>10} {'server':>6} {'worker':>6} {'server':>6}"
    )
    for row in rows:
        if ones[row.name] and twos[row.name]:
            print_row(row, median(ones[row.name]), median(twos[row.name]), num_wakes)


def print_row(row: Row, one: Drained, two: Drained, num_wakes: int) -> None:
    """Format one line of that table."""
    wakes = row.wakes_ms(num_wakes) if row.wakes_ms else []
    woken = f"{percentile(wakes, 50):6.1f} {percentile(wakes, 99):7.1f}" if wakes else f"{'':6} {'':7}"
    rows = f"{one.recorded_per_s:8,.0f}" if one.recorded_per_s is not None else f"{'':8}"
    print(
        f"{row.name:16} {one.submitted_per_s:9,.0f} {one.done_per_s:8,.0f} {two.done_per_s:8,.0f} {rows} {woken} "
        f"{one.commands_per_job:8.1f} {one.client_us_per_submit:10.0f} {one.server_us_per_submit:6.0f} "
        f"{one.worker_us_per_job:6.0f} {one.server_us_per_job:6.0f}",
        flush=True,
    )


def print_kills(rows: Sequence[Row]) -> None:
    """Print the table of worker deaths."""
    print(f"\nSIGKILL amid {KILLED_JOBS} jobs, another worker at once, looked at for {KILL_WITHIN_S:g} s")
    print(f"{'queue':16} {'missing':>8} {'twice':>6} {'started again':>13} {'all ran after s':>15}")
    for row in rows:
        if row.kill:
            found = row.kill()
            after = f"{found.took_s:.1f}" if not found.missing else "never"
            print(f"{row.name:16} {found.missing:8} {found.twice:6} {found.started_again:13} {after:>15}", flush=True)


def print_streams(
    num_rounds: int, num_jobs: Sequence[int], intervals_s: Sequence[float], tokens: int = queue_streams.TOKENS
) -> None:
    """Print the cost and latency of tokens, and the effect of a slower network."""
    header = f"{'tokens/s':>9} {'worker us':>9} {'server us':>9} {'with 1 ms more':>14}"
    print(f"\n{'streaming at once':>17} {'every ms':>8} {header}")
    for count in num_jobs:
        runs: dict[float, list[tuple[queue_streams.Streamed, queue_streams.Streamed]]] = {
            one: [] for one in intervals_s
        }
        for _ in range(num_rounds):
            for interval_s, pairs in runs.items():
                near = queue_streams.stream(count, interval_s, tokens=tokens)
                pairs.append((near, queue_streams.stream(count, interval_s, tokens=tokens, delay_s=DELAY_S)))
        for interval_s, pairs in runs.items():
            print(f"{count:17} {1000 * interval_s:8.0f} {_streams_row(pairs)}", flush=True)
    sent = queue_streams.underway_ms(tokens)
    print(f"sent to read: p50 {percentile(sent, 50):.2f} ms, p99 {percentile(sent, 99):.2f} ms")


def _streams_row(pairs: Sequence[tuple[queue_streams.Streamed, queue_streams.Streamed]]) -> str:
    near = [one for one, _ in pairs]
    kept = statistics.median(slow.tokens_per_s / one.tokens_per_s for one, slow in pairs)
    return (
        f"{statistics.median(one.tokens_per_s for one in near):9,.0f} "
        f"{statistics.median(one.worker_us_per_token for one in near):9.1f} "
        f"{statistics.median(one.server_us_per_token for one in near):9.1f} {kept:14.3f}"
    )


DELAY_S = queue_streams.EACH_WAY_S
SECTIONS = ("jobs", "kill", "streams")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs of each run (default 20000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median is printed (default 3)")
    parser.add_argument("--wakes", type=int, default=200, help="jobs that wake an idle worker (default 200)")
    parser.add_argument("--peers", default="none", help="all, none, or names with commas (default none)")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)} (default all)")
    parser.add_argument("--tokens", type=int, default=queue_streams.TOKENS, help="of each job that streams")
    parser.add_argument("--streams", default="64,256", help="how many jobs stream at once (default 64,256)")
    parser.add_argument(
        "--intervals", default="0,0.02,0.05", help="seconds between tokens' journeys (default 0,0.02,0.05)"
    )
    given = parser.parse_args()
    shorthands: dict[str, list[str]] = {"all": list(queue_side.RECIPES), "none": []}
    peers = shorthands.get(given.peers) or [name for name in given.peers.split(",") if name in queue_side.RECIPES]
    rows, wanted = [*our_rows(), *map(peer_row, peers)], given.sections.split(",")
    print(f"{version_of_server()}, load {os.getloadavg()[0]:.1f} before the start\n")
    if "jobs" in wanted:
        print_jobs(rows, given.jobs, given.rounds, given.wakes)
    if "kill" in wanted:
        print_kills(rows)
    if "streams" in wanted:
        counts, intervals_s = map(int, given.streams.split(",")), map(float, given.intervals.split(","))
        print_streams(given.rounds, list(counts), list(intervals_s), given.tokens)


if __name__ == "__main__":
    main()
