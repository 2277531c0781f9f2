"""Arrivals over the 100 M model on this CPU; pauses between them are skipped."""

from collections.abc import Callable, Sequence

from benchmarks.disciplines.runs import Machine
from benchmarks.engine.bare import model_folder
from sluice.engine.config import EngineConfig
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.execution.threads import limit_spinning
from sluice.engine.simulation.arrivals import Arrival
from sluice.engine.simulation.replay import ComputeClock, Replay, replay


def real_runs(machine: Machine, arrivals: Sequence[Arrival]) -> Callable[[EngineConfig], Replay]:
    """Load the model, warm it up, and return what replays `arrivals` with given settings."""
    limit_spinning()
    runner = load_model_runner(
        ModelOptions(
            path=model_folder(),
            num_blocks=machine.num_blocks,
            max_model_len=min(machine.max_model_len, 4096),
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=machine.budget,
        )
    )
    clock = ComputeClock()
    replay(arrivals[:8], runner, EngineConfig(max_num_batched_tokens=machine.budget), clock)
    return lambda config: replay(arrivals, runner, config, clock)
