"""Goodput under fixed token budgets of a step, and under a budget of time.

    python -m benchmarks budgets [--real] [--size SHARE] [--slower TIMES]

Chats and long prompts, the same arrivals for every row. Fixed budgets of 128 to 2,048 tokens a step; then 2,048 tokens
with the limit that a worker has without targets (100 ms), and with the targets of the table. In virtual time for two
machines: a model of 8 billion parameters on one GPU (a calculation, `benchmarks.disciplines.runs`), and the 100 M model
on two cores (fitted, docs/lab/tuning.md). The engine does not know these step times: it measures its steps.

With --real, runs the 100 M model on this CPU instead; pauses between arrivals are skipped. With --slower, arrivals and
targets are so many times slower, for a processor on which the model is.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.disciplines.runs import CARD, Machine, Row, row, table_of
from sluice.engine.config import EngineConfig, StepTargets
from sluice.engine.scheduling.timing.step_time import StepTime
from sluice.engine.simulation.arrivals import Arrival, constant, merged, poisson, uniform
from sluice.engine.simulation.figures import Target
from sluice.engine.simulation.replay import Replay, simulate

TWO_CORES = StepTime(fixed_s=14.2e-3, token_s=204e-6, kv_token_s=440e-9, pair_s=181e-9)
"""The random 100 M Llama on two cores, as fitted by `worker tune` (docs/lab/tuning.md)."""

BUDGETS = (128, 256, 512, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A machine, what arrives there, and what is wanted."""

    name: str
    machine: Machine
    arrivals: Callable[[float], list[Arrival]]
    """By share of the requests."""

    target: Target

    def configs(self) -> dict[str, EngineConfig]:
        """Return the settings to compare, by name."""
        fixed = {f"{budget:,} tokens": self._config(budget) for budget in BUDGETS}
        wanted = StepTargets(ttft_s=self.target.ttft_s, tpot_s=self.target.tpot_s)
        timed = {"at most 100 ms": StepTargets(), "by the targets": wanted}
        return fixed | {name: self._config(BUDGETS[-1], targets) for name, targets in timed.items()}

    def _config(self, budget: int, targets: StepTargets | None = None) -> EngineConfig:
        return EngineConfig(
            max_num_seqs=self.machine.max_num_seqs,
            max_num_batched_tokens=budget,
            step_targets=targets,
            enable_prefix_caching=False,
        )

    def slower(self, times: float) -> "Case":
        """Return it with targets that many times as long."""
        target = replace(self.target, ttft_s=times * self.target.ttft_s, tpot_s=times * self.target.tpot_s)
        return replace(self, target=target)

    def title(self, arrivals: Sequence[Arrival]) -> str:
        """Describe it in a line."""
        target = f"TTFT <= {self.target.ttft_s:g} s, TPOT <= {self.target.tpot_s * 1e3:g} ms"
        return f"== {self.name}; {len(arrivals)} requests in {arrivals[-1].at_s:.0f} s; {target}"


def _on_cores(size: float) -> list[Arrival]:
    seconds = 40 * size
    chats = poisson(4.0, round(4.0 * seconds), uniform(16, 200), uniform(20, 60), seed=1)
    return merged(chats, poisson(1.0, max(1, round(seconds)), constant(1200), constant(8), seed=2))


def _on_card(size: float) -> list[Arrival]:
    seconds = 60 * size
    chats = poisson(8.0, round(8.0 * seconds), uniform(32, 2000), uniform(50, 350), seed=1)
    return merged(chats, poisson(1.0, max(1, round(seconds)), constant(8192), constant(32), seed=2))


CASES = (
    Case(
        name="100 M on two cores: 4 chats/s of 16-200 + 20-60 tokens, a prompt of 1,200 a second",
        machine=Machine(step_time=TWO_CORES),
        arrivals=_on_cores,
        target=Target(ttft_s=2.0, tpot_s=0.09),
    ),
    Case(
        name="8B-like card: 8 chats/s of 32-2,000 + 50-350 tokens, a prompt of 8,192 a second",
        machine=Machine(step_time=CARD, num_blocks=16384),
        arrivals=_on_card,
        target=Target(ttft_s=1.0, tpot_s=0.025),
    ),
)


def compare(case: Case, arrivals: Sequence[Arrival], run: Callable[[EngineConfig], Replay]) -> list[Row]:
    """Run each configuration of `case`."""
    print(case.title(arrivals), flush=True)
    return [row(name, run(config), case.target) for name, config in case.configs().items()]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="run the 100 M model on this CPU")
    parser.add_argument("--size", type=float, default=1.0, metavar="SHARE", help="share of the requests to send")
    parser.add_argument("--slower", type=float, default=1.0, metavar="TIMES", help="slow down arrivals and targets")
    asked = parser.parse_args()
    for given in CASES[:1] if asked.real else CASES:
        case = given.slower(asked.slower)
        arrivals = [replace(one, at_s=asked.slower * one.at_s) for one in case.arrivals(asked.size)]
        print(table_of(compare(case, arrivals, runs(case.machine, arrivals, is_real=asked.real))), flush=True)


def runs(machine: Machine, arrivals: list[Arrival], *, is_real: bool) -> Callable[[EngineConfig], Replay]:
    """Return what replays `arrivals` with given settings, in virtual time or on this CPU."""
    if is_real:
        # Seconds to import torch, which virtual time does without.
        from benchmarks.engine.real import real_runs

        return real_runs(machine, arrivals)
    return lambda config: simulate(arrivals, machine.step_time, config, machine.cache)


if __name__ == "__main__":
    main()
