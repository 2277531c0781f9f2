"""All disciplines over a real model on this CPU, and the same arrivals in virtual time with its fitted step time."""

from collections.abc import Sequence

from benchmarks.disciplines.runs import CaseResult, Claim, Machine, Row, config_for, row, times
from benchmarks.engine.bare import model_folder
from sluice.engine.config import DISCIPLINE_NAMES
from sluice.engine.execution.model_runner import ModelOptions, load_model_runner
from sluice.engine.execution.threads import limit_spinning
from sluice.engine.simulation.arrivals import Arrival, geometric, poisson, uniform
from sluice.engine.simulation.figures import Target
from sluice.engine.simulation.replay import RealClock, Replay, replay, simulate
from sluice.engine.simulation.step_time import Fit, fit

_ORDER = tuple(reversed(DISCIPLINE_NAMES))
_LONGEST = 384
_TARGET = Target(ttft_s=2.0, tpot_s=0.1)


def on_this_cpu(size: float) -> CaseResult:
    """Run a random model of 125 M parameters: 48 requests at 4 per second under each discipline, real and predicted.

    The step time for a discipline is fitted to the steps of all other disciplines.
    """
    limit_spinning()
    count = max(6, round(48 * size))
    arrivals = poisson(4.0, count, uniform(16, _LONGEST), geometric(64, most=192), max_tokens=192)
    machine = Machine(num_blocks=1024, max_model_len=1024, max_num_seqs=16, budget=256)
    replays = _replays(machine, arrivals)
    rows: list[Row] = []
    for name in _ORDER:
        others = [replayed for other, replayed in replays.items() if other != name]
        rows.append(row(name, replays[name], _TARGET))
        rows.append(row("  predicted", _predicted(name, machine, arrivals, _fit(others)), _TARGET))
    static, ours = rows[0].figures, rows[-2].figures
    found = _fit(list(replays.values()))
    misses = [abs(rows[i + 1].figures.e2e_mean_s / rows[i].figures.e2e_mean_s - 1) for i in range(0, len(rows), 2)]
    return CaseResult(
        name="real",
        setting="125 M Llama, bf16, on this CPU; 4 requests/s, prompts 16-384, outputs mean 64; 16 slots, budget 256",
        rows=rows,
        claims=[
            Claim(
                what="tokens a second, static -> continuous",
                published="23x (Anyscale, with vLLM's kernels), 36.9x at equal latency (Orca, 175 B)",
                predicted="1.5-2x",
                measured=times(ours.output_tokens_per_s, static.output_tokens_per_s),
            ),
            Claim(
                what="mean E2E as simulated, over as measured, less one",
                published="-",
                predicted="within 15 %",
                measured=", ".join(f"{miss:.0%}" for miss in misses),
            ),
        ],
        notes=[
            f"step time: {found.step_time}; half of the {found.num_steps} steps within {found.median_error:.1%}, "
            f"all together {found.total_error:+.1%}"
        ],
    )


def _replays(machine: Machine, arrivals: Sequence[Arrival]) -> dict[str, Replay]:
    """Run each discipline once; the first run is a warm-up and is not counted."""
    configs = {name: config_for(name, machine, arrivals) for name in _ORDER}
    runner = load_model_runner(
        ModelOptions(
            path=model_folder(),
            num_blocks=machine.num_blocks,
            max_model_len=machine.max_model_len,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=max(config.max_num_batched_tokens for config in configs.values()),
        )
    )
    clock = RealClock()
    replay(arrivals[:4], runner, configs["static"], clock)
    return {name: replay(arrivals, runner, config, clock) for name, config in configs.items()}


def _fit(replays: list[Replay]) -> Fit:
    return fit([(step.work, step.taken_s) for replayed in replays for step in replayed.steps])


def _predicted(name: str, machine: Machine, arrivals: Sequence[Arrival], found: Fit) -> Replay:
    return simulate(arrivals, found.step_time, config_for(name, machine, arrivals), machine.cache)
