"""Two models on one device and a day's arrivals in an hour: when their first tokens come, and what switches take.

    python -m benchmarks turns [--share SHARE] [--switch-s SECONDS] [--seed N] [--switches]

`chat` has short jobs of class 5 whose number follows the day; `batch` has eight batches of long jobs of class 0, which
fill the device for about a third of the day. All times are virtual. TTFT includes every wait; p99 of the batch is the
time to its last jobs' first tokens. "Lost" is the share of time in switches away from a model that had work.
"""

import argparse
import math
from collections.abc import Sequence
from random import Random

from benchmarks.tables import table
from benchmarks.turns.policies import always_to_the_oldest, fixed_quantum, when_empty
from benchmarks.turns.simulation import Job, ModelLoad, Outcome, Policy, Simulation
from sluice.worker.processes.turns.policy import TurnRules, choose

DAY_S = 3600.0
NUM_BATCHES, BATCH_JOBS = 8, 120
CHATS_AT_NIGHT, CHATS_AT_NOON = 0.02, 0.4

POLICIES: dict[str, Policy] = {
    "worker fleet": choose,
    "always to the oldest": always_to_the_oldest,
    "fixed quantum, 30 s": fixed_quantum,
    "when empty": when_empty,
}


def main() -> None:
    """Simulate each policy and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=TurnRules().share, help="largest share of time for switches")
    parser.add_argument("--switch-s", type=float, default=5.0, help="seconds of a switch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--switches", action="store_true", help="measure real switches on this CPU instead")
    given = parser.parse_args()
    if given.switches:
        from benchmarks.turns.switches import measure  # with torch, which a simulation does not need

        print(measure())
        return
    rows = [("policy", "model", "TTFT p50 s", "p99 s", "switches", "switching", "of it lost", "last end s")]
    for name, policy in POLICIES.items():
        outcome = simulate(policy, share=given.share, switch_s=given.switch_s, seed=given.seed)
        rows += _rows(name, outcome)
    print(table(rows))


def simulate(policy: Policy, *, share: float, switch_s: float, seed: int) -> Outcome:
    """Run a day under a policy."""
    loads = {
        "chat": ModelLoad(switch_s=switch_s, step_s=0.02),
        "batch": ModelLoad(switch_s=switch_s, step_s=0.02),
    }
    simulation = Simulation(loads, policy, TurnRules(share=share))
    return simulation.run(day_of(Random(seed)), until_s=4 * DAY_S)


def day_of(random: Random) -> list[Job]:
    """Return the arrivals of a day: chats by a rate that follows the hour, and batches at random hours."""
    jobs, at_s = list[Job](), 0.0
    while (at_s := at_s + random.expovariate(CHATS_AT_NOON)) < DAY_S:
        rate = CHATS_AT_NIGHT + (CHATS_AT_NOON - CHATS_AT_NIGHT) * (1 - math.cos(2 * math.pi * at_s / DAY_S)) / 2
        if random.random() < rate / CHATS_AT_NOON:
            jobs.append(_job(random, "chat", at_s, prompt=400, output=150, priority=5))
    for _ in range(NUM_BATCHES):
        at_s = random.uniform(0, DAY_S)
        jobs += [_job(random, "batch", at_s, prompt=800, output=600, priority=0) for _ in range(BATCH_JOBS)]
    return jobs


def _job(random: Random, model: str, at_s: float, *, prompt: int, output: int, priority: int) -> Job:
    def length(mean: int) -> int:
        return max(1, round(random.lognormvariate(math.log(mean) - 0.18, 0.6)))

    return Job(model=model, at_s=at_s, prompt_tokens=length(prompt), output_tokens=length(output), priority=priority)


def _rows(name: str, outcome: Outcome) -> list[tuple[str, ...]]:
    parts = (outcome.switch_s, outcome.lost_s)
    of_both = [f"{outcome.num_switches}", *(f"{100 * part / outcome.span_s:.1f} %" for part in parts)]
    rows = list[tuple[str, ...]]()
    for model in ("chat", "batch"):
        jobs = [job for job in outcome.jobs if job.model == model]
        waits = sorted(math.inf if job.first_s is None else job.first_s - job.at_s for job in jobs)
        end_s = max(math.inf if job.end_s is None else job.end_s for job in jobs)
        rows.append((name, model, f"{_at(waits, 0.5):.1f}", f"{_at(waits, 0.99):.1f}", *of_both, f"{end_s:.0f}"))
        name, of_both = "", ["", "", ""]
    return rows


def _at(waits: Sequence[float], share: float) -> float:
    return waits[min(len(waits) - 1, int(share * len(waits)))]


if __name__ == "__main__":
    main()
