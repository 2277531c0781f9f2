"""How fast the queue itself is: jobs submitted and drained a second, with a model that computes nothing.

    python -m benchmarks.queue [--jobs 20000]

Everything is real: the embedded server with its append-only file, the client library, worker processes. A no-op job
asks for one token and has a prompt of 16 bytes, or of 400, which the null model takes for as many tokens: the engine
checks and hashes them as it would a model's. `burst` drains with no recorder, so the outbox grows; `sustained` ends
when every job has its row in SQLite.
"""

import argparse
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.service_parts import num_done, own_server, wait_until, worker
from producer.client import Producer

NO_OP_BYTES, PROMPT_BYTES = 16, 400
NULL = ("--model", "null", "--max-num-seqs", "256", "--max-num-batched-tokens", "131072", "--log-level", "warning")


def submit(producer: Producer, num_jobs: int, prompt_bytes: int = PROMPT_BYTES) -> float:
    """Submit jobs of one token; jobs per second."""
    prompt, began_s = "x" * prompt_bytes, time.perf_counter()
    answers = producer.submit_many((prompt for _ in range(num_jobs)), max_tokens=1, stream=False)
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    if refused:
        raise RuntimeError(f"{len(refused)} jobs were refused: {refused[0]}")
    return num_jobs / (time.perf_counter() - began_s)


def num_rows(folder: Path) -> int:
    """Jobs that the history has as done."""
    with sqlite3.connect(f"file:{folder / 'history.db'}?mode=ro", uri=True) as connection:
        return connection.execute("SELECT count(*) FROM jobs WHERE state = 'done'").fetchone()[0]


def drain(num_jobs: int, prompt_bytes: int, *options: str, num_workers: int = 1) -> tuple[float, float, float]:
    """Let workers drain a queue that is full when they begin: jobs per second submitted, done, and recorded."""
    with own_server() as folder, Producer() as producer:
        producer.pause()
        submitted_per_s = submit(producer, num_jobs, prompt_bytes)
        with Workers(num_workers, folder, options):
            began_s = time.perf_counter()
            producer.pause(is_paused=False)
            wait_until(lambda: num_done(producer) == num_jobs, "all jobs to be done")
            done_s = time.perf_counter() - began_s
            if "--no-recorder" not in options:
                wait_until(lambda: num_rows(folder) == num_jobs, "all jobs to be recorded")
            recorded_s = time.perf_counter() - began_s
    return submitted_per_s, num_jobs / done_s, num_jobs / recorded_s


class Workers:
    """So many workers, all ready; the first with the options given, the others without a recorder."""

    def __init__(self, count: int, folder: Path, options: tuple[str, ...]) -> None:
        self._parts = [
            worker(*NULL, *(options if i == 0 else ("--no-recorder",)), log=folder / f"worker-{i}.log")
            for i in range(count)
        ]

    def __enter__(self) -> None:
        for part in self._parts:
            part.__enter__()

    def __exit__(self, *error: object) -> None:
        for part in reversed(self._parts):
            part.__exit__(None, None, None)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs of each run (default 20000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median is printed (default 3)")
    given = parser.parse_args()
    cases: list[tuple[str, Callable[[], tuple[float, float, float]]]] = [
        ("burst, no-op", lambda: drain(given.jobs, NO_OP_BYTES, "--no-recorder")),
        ("burst, no-op, two workers", lambda: drain(given.jobs, NO_OP_BYTES, "--no-recorder", num_workers=2)),
        ("burst, 400-byte prompts", lambda: drain(given.jobs, PROMPT_BYTES, "--no-recorder")),
        ("sustained, history on, no-op", lambda: drain(given.jobs, NO_OP_BYTES)),
    ]
    print(f"{'case':28} {'submit/s':>10} {'done/s':>10} {'recorded/s':>10}")
    for name, run in cases:
        rounds = sorted(run() for _ in range(given.rounds))
        submitted, done, recorded = (sorted(column)[given.rounds // 2] for column in zip(*rounds, strict=True))
        shown = f"{recorded:10,.0f}" if "history" in name else f"{'-':>10}"
        print(f"{name:28} {submitted:10,.0f} {done:10,.0f} {shown}")


if __name__ == "__main__":
    main()
