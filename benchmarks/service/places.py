"""For how many steps a place that a job leaves stays empty: `python -m benchmarks places [--jobs 3000]`.

One worker with the null model at 5 ms a step, 64 places, a backlog all the time, prompts of 16 and outputs of 5 to 60
tokens, read from the worker's own description of each iteration. 0 steps: the next step uses the place. The first and
the last steps, in which places fill and no backlog is left, are left out. With `--every-s`, an interactive job of a
higher class is submitted that often as well, one at a time; the time to its first token is at the reader.
"""

import argparse
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean, quantiles

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


def use_of(steps: Sequence[Step]) -> str:
    """Return how many places were freed, and how they were used, while there was a backlog."""
    full = [number for number, step in enumerate(steps) if step.num_run == NUM_PLACES]
    busy = steps[full[0] : full[-1] + 1]
    num_freed, num_run = sum(step.num_left for step in busy[:-1]), [step.num_run for step in busy]
    num_empty = NUM_PLACES * len(busy) - sum(num_run)
    return (
        f"{num_freed} freed places stayed empty for {num_empty / num_freed:.2f} steps each; "
        f"{fmean(num_run):.1f} of {NUM_PLACES} ran"
    )


def first_tokens_ms(every_s: float, until: threading.Event) -> list[float]:
    """Submit interactive jobs until then; return the milliseconds from before each submit to its first token."""
    waits_ms: list[float] = []
    with Producer() as producer:
        while not until.wait(every_s):
            began_s = time.monotonic()
            events = producer.stream(producer.submit("a question", priority=9, max_tokens=FEWEST_TOKENS))
            next(iter(events))
            waits_ms.append((time.monotonic() - began_s) * 1000)
            for _ in events:
                pass
    return waits_ms


def measure(here: Server, num_jobs: int, every_s: float) -> str:
    """Run the load, and return what `use_of` says, and the first tokens' times."""
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
        is_drained = threading.Event()
        with ThreadPoolExecutor(1) as interactive:
            waits_ms = interactive.submit(first_tokens_ms, every_s, is_drained) if every_s else None
            wait_until(lambda: here.count("done") >= num_jobs - NUM_PLACES, "the backlog to be done", every_s=0.2)
            is_drained.set()
    return use_of(steps) + (f"; first tokens {spread(waits_ms.result())}" if waits_ms else "")


def spread(waits_ms: Sequence[float]) -> str:
    """Return the median, the p99 and the number of some times."""
    cuts = quantiles(waits_ms, n=100)
    return f"p50 {cuts[49]:.1f}, p99 {cuts[98]:.1f} ms of {len(waits_ms)} jobs"


def main() -> None:
    """Print the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every-s", type=float, default=0.0)
    given = parser.parse_args()
    for _ in range(given.rounds):
        with server() as here:
            print(measure(here, given.jobs, given.every_s), flush=True)


if __name__ == "__main__":
    main()
