"""How many places that jobs leave are taken in the next step: `python -m benchmarks places [--jobs 3000]`.

One worker with the null model at 5 ms a step, 64 places, a backlog all the time, prompts of 16 and outputs of 5 to 60
tokens, read from the worker's own description of each iteration. A place that is taken n steps after the next one
counts n times as left empty, so the share is 1 less empty places over freed ones. The first and the last steps, in
which places fill and no backlog is left, are left out.
"""

import argparse
import random
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.processes import Server, free_port, server, wait_until, worker
from sluice.producer.client import Producer
from sluice.protocol.jobs import job
from sluice.worker.config import MetricsConfig
from sluice.worker.iterations.live import live_iterations

NUM_PLACES, STEP_S, NUM_PROMPT_TOKENS, FEWEST_TOKENS, MOST_TOKENS = 64, 0.005, 16, 5, 60
_RUN, _LEAVES = re.compile(r"(\d+) run "), re.compile(r"\s+leaves\s+(.*)")


@dataclass(frozen=True, slots=True)
class Step:
    """What an iteration had."""

    num_run: int
    num_left: int


def steps_of(lines: Iterator[str]) -> Iterator[Step]:
    """Read the iterations that a worker describes."""
    num_run, num_left = 0, 0
    for line in lines:
        if (head := _RUN.search(line)) is not None and not line.startswith("        "):
            if num_run:
                yield Step(num_run, num_left)
            num_run, num_left = int(head[1]), 0
        elif (leaves := _LEAVES.match(line)) is not None:
            num_left = len(leaves[1].split(", "))


def share_used_at_once(steps: Sequence[Step]) -> tuple[float, int]:
    """Return the share of freed places that the next step uses, and how many were freed, while there is a backlog."""
    first = next(i for i, step in enumerate(steps) if step.num_run == NUM_PLACES)
    last = max(i for i, step in enumerate(steps) if step.num_run == NUM_PLACES)
    num_empty = sum(NUM_PLACES - step.num_run for step in steps[first : last + 1])
    num_freed = sum(step.num_left for step in steps[first:last])
    return 1 - num_empty / num_freed, num_freed


def measure(here: Server, num_jobs: int) -> tuple[float, int]:
    """Run the load, and return what `share_used_at_once` does."""
    dice, steps = random.Random(1), list[Step]()
    port = free_port()
    flags = ("--max-num-seqs", str(NUM_PLACES), "--metrics-port", str(port))
    with Producer() as producer, worker(here, *flags, model=f"null?step_s={STEP_S}"):
        lines = live_iterations(MetricsConfig(port=port), has_all=True)
        threading.Thread(target=lambda: steps.extend(steps_of(lines)), daemon=True).start()
        jobs = (
            job(
                bytes(dice.randrange(97, 122) for _ in range(NUM_PROMPT_TOKENS)).decode(),
                max_tokens=dice.randint(FEWEST_TOKENS, MOST_TOKENS),
                ignore_eos=True,
            )
            for _ in range(num_jobs)
        )
        for _ in producer.submit_many(jobs):
            pass
        wait_until(lambda: here.count("done") == num_jobs, "all jobs to be done", every_s=0.2)
    return share_used_at_once(steps)


def main() -> None:
    """Print the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for _ in range(given.rounds):
        with server() as here:
            share, num_freed = measure(here, given.jobs)
        print(f"{share:.4f} of {num_freed} freed places are used in the next step", flush=True)


if __name__ == "__main__":
    main()
