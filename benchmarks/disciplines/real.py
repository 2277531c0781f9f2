"""A real model on this CPU: all disciplines, with the same arrivals in virtual time, and 1 to 256 sequences at once."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.disciplines.runs import CaseResult, Claim, Machine, Row, config_for, row, times
from benchmarks.disciplines.sweeps import knee_of
from benchmarks.engine.bare import model_folder
from sluice.engine.config import DISCIPLINE_NAMES
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.execution.threads import limit_spinning
from sluice.engine.scheduling.timing.fitting import Fit, fit
from sluice.engine.simulation.arrivals import Arrival, geometric, poisson, uniform
from sluice.engine.simulation.figures import Target
from sluice.engine.simulation.replay import ComputeClock, Replay, replay, simulate

_ORDER = tuple(reversed(DISCIPLINE_NAMES))
_LONGEST = 384
_TARGET = Target(ttft_s=2.0, tpot_s=0.1)


def on_this_cpu(size: float, dtype: str) -> CaseResult:
    """Run a random model of 125 M parameters: a burst of 64 requests under each discipline, real and predicted.

    A burst, because arrivals that a discipline can keep up with cap what it shows. The step time for a discipline is
    fitted to the steps of all other disciplines.
    """
    limit_spinning()
    count = max(6, round(64 * size))
    arrivals = poisson(1e6, count, uniform(16, _LONGEST), geometric(64, most=192), max_tokens=192)
    machine = Machine(num_blocks=1024, max_model_len=1024, max_num_seqs=16, budget=256)
    replays = _replays(machine, arrivals, dtype)
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
        setting=f"125 M Llama, {dtype}, on this CPU; a burst of {count}, prompts 16-384, outputs mean 64; 16 slots, "
        "budget 256",
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


def sequences_on_this_cpu(size: float, dtype: str) -> CaseResult:
    """Measure throughput and latency of `continuous` with 1 to 256 sequences at once, while others wait."""
    limit_spinning()
    counts = [2**power for power in range(9)]
    wide = Machine(num_blocks=4096, max_model_len=256, max_num_seqs=counts[-1], budget=512)
    runner, clock = _runner(wide, wide.budget, dtype), ComputeClock()
    rows: list[Row] = []
    for count in counts:
        arrivals = poisson(1e6, max(4, round(2 * count * size)), uniform(16, 48), uniform(16, 48))
        machine = replace(wide, max_num_seqs=count)
        rows.append(row(f"{count}", replay(arrivals, runner, config_for("continuous", machine, arrivals), clock)))
    return CaseResult(
        name="real-concurrency",
        setting=f"125 M Llama, {dtype}, on this CPU; a burst, prompts and outputs 16-48; rows are sequences at once",
        rows=rows,
        claims=[knee_of(counts, rows, predicted="16")],
    )


def _replays(machine: Machine, arrivals: Sequence[Arrival], dtype: str) -> dict[str, Replay]:
    """Run each discipline once; the first run is a warm-up and is not counted."""
    configs = {name: config_for(name, machine, arrivals) for name in _ORDER}
    runner = _runner(machine, max(config.max_num_batched_tokens for config in configs.values()), dtype)
    clock = ComputeClock()
    replay(arrivals[:4], runner, configs["static"], clock)
    return {name: replay(arrivals, runner, config, clock) for name, config in configs.items()}


def _runner(machine: Machine, budget: int, dtype: str) -> ModelRunner:
    return load_model_runner(
        ModelOptions(
            path=model_folder(),
            dtype=dtype,
            num_blocks=machine.num_blocks,
            max_model_len=machine.max_model_len,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=budget,
        )
    )


def _fit(replays: list[Replay]) -> Fit:
    return fit([(step.work, step.taken_s) for replayed in replays for step in replayed.steps])


def _predicted(name: str, machine: Machine, arrivals: Sequence[Arrival], found: Fit) -> Replay:
    return simulate(arrivals, found.step_time, config_for(name, machine, arrivals), machine.cache)
