"""Admission modes under a load that overcommits the cache.

    python -m benchmarks admission [--real] [--size SHARE]

A burst of 200 requests of about 100 prompt and 600 output tokens, a cache of 20,000 tokens, 64 sequences at once, no
prefix cache. In virtual time with the step times of `benchmarks budgets`, once with limits that are the lengths of the
outputs, and once with limits of four times as much, which is what most clients send. With --real, runs the first on
this CPU with the 100 M model.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random

from benchmarks.disciplines.runs import CARD, Machine
from benchmarks.engine.budgets import TWO_CORES, runs
from sluice.engine.config import ADMISSION_NAMES, EngineConfig
from sluice.engine.simulation.arrivals import Arrival
from sluice.engine.simulation.figures import Target, summarise
from sluice.engine.simulation.replay import Replay

MACHINES = {
    "100 M on two cores": Machine(step_time=TWO_CORES, num_blocks=1250, max_model_len=4096),
    "8B-like card": Machine(step_time=CARD, num_blocks=1250, max_model_len=4096),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Figures of one mode."""

    tokens_per_s: float
    preemptions: float
    """Per request."""

    computed_twice: float
    """Tokens computed again, of those that had to be computed."""

    num_rows: float
    """Mean number of sequences in a step, over time."""

    ttft_p50_s: float
    itl_max_s: float

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:>9,.0f}{self.preemptions:>14.2f}{self.computed_twice:>16.1%}{self.num_rows:>7.1f}"
            f"{self.ttft_p50_s:>12.1f}{self.itl_max_s:>14.2f}"
        )


HEAD = (
    f"{'':<12}{'tokens/s':>9}{'preempt./req':>14}{'computed twice':>16}{'rows':>7}{'TTFT p50 s':>12}{'max gap s':>14}"
)


def burst(size: float, *, slack: int = 1) -> list[Arrival]:
    """Return the requests; each may generate `slack` times what it does."""
    random = Random(0)
    arrivals = [
        Arrival(at_s=0.0, num_prompt_tokens=random.randint(50, 150), num_output_tokens=random.randint(400, 800))
        for _ in range(max(16, round(200 * size)))
    ]
    return [replace(one, max_tokens=one.num_output_tokens * slack) for one in arrivals]


def line_of(replay: Replay) -> Line:
    """Return the figures of a replay."""
    figures = summarise(replay, Target(ttft_s=1.0, tpot_s=1.0))
    num_computed = sum(step.work.num_tokens for step in replay.steps)
    # The last token of an output is never computed.
    num_needed = sum(one.arrival.num_prompt_tokens + one.arrival.num_output_tokens - 1 for one in replay.completed)
    return Line(
        tokens_per_s=figures.output_tokens_per_s,
        preemptions=figures.num_preemptions / figures.num_requests,
        computed_twice=num_computed / num_needed - 1,
        num_rows=figures.occupancy * replay.config.max_num_seqs,
        ttft_p50_s=figures.ttft_p50_s,
        itl_max_s=figures.itl_max_s,
    )


def compare(run: Callable[[EngineConfig], Replay]) -> Iterable[tuple[str, Line]]:
    """Run each mode."""
    for name in ADMISSION_NAMES:
        yield name, line_of(run(EngineConfig(admission=name, enable_prefix_caching=False)))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="run the 100 M model on this CPU")
    parser.add_argument("--size", type=float, default=1.0, metavar="SHARE", help="share of the requests to send")
    asked = parser.parse_args()
    for name, machine in list(MACHINES.items())[: 1 if asked.real else None]:
        for slack in (1,) if asked.real else (1, 4):
            arrivals = burst(asked.size, slack=slack)
            print(f"\n== {name}, {len(arrivals)} requests, limits of {slack} times the outputs\n{HEAD}", flush=True)
            for mode, line in compare(runs(machine, arrivals, is_real=asked.real)):
                print(f"{mode:<12}{line}", flush=True)


if __name__ == "__main__":
    main()
