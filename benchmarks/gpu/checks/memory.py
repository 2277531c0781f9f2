"""Long prompts in nearly all of the device's memory: section "memory" of `benchmarks gpu`.

The cache gets 97 % of what the weights leave free, less the measured memory of the largest step. If that is measured
too low, a step runs out of memory: the engine halves its steps and continues, and the line is wrong.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from unittest.mock import patch

from benchmarks.engine.bare import Job
from benchmarks.gpu.engines import options_of, random_folder, run_ours, shape_of
from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from sluice.engine.batch import Batch
from sluice.engine.config import StepLimits
from sluice.engine.errors import OutOfMemory
from sluice.engine.execution.memory import free_memory_bytes
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.executor import Launched

FRACTION = 0.97


def groups(scale: Scale) -> Groups:
    """Return one group."""
    return {"long prompts": lambda: _lines(scale)}


def _lines(scale: Scale) -> Iterator[Line]:
    max_num_seqs = 4 if scale.is_toy else StepLimits.of("cuda").max_num_seqs
    with random_folder(scale) as folder:
        options = options_of(scale, folder, max_num_seqs=max_num_seqs)
        runner = load_model_runner(replace(options, num_blocks=None, memory_fraction=FRACTION))
        limits, random = runner.limits, Random(0)
        num_output_tokens = 4 if scale.is_toy else 32
        num_prompt_tokens = limits.max_model_len - num_output_tokens
        jobs = [
            Job(tuple(random.randrange(2, 300) for _ in range(num_prompt_tokens)), num_output_tokens)
            for _ in range(max_num_seqs)
        ]
        free_bytes = free_memory_bytes(scale.device)
        # The first run records steps, in which memory is taken too.
        num_shortages = _num_shortages(runner, jobs) + _num_shortages(runner, jobs)
    figures: dict[str, float | str] = {
        "tokens of cache": limits.num_blocks * limits.block_size,
        "tokens of a prompt": num_prompt_tokens,
        "prompts": len(jobs),
        "GiB free at start": free_bytes / 2**30,
        "GiB free at end": free_memory_bytes(scale.device) / 2**30,
        "steps out of memory": num_shortages,
    }
    yield Line(f"{shape_of(scale)}, {FRACTION:.0%} of memory", figures, num_shortages == 0)


def _num_shortages(runner: ModelRunner, jobs: list[Job]) -> int:
    """Run all jobs; return how many of their steps ran out of memory."""
    num_shortages, launch = 0, runner.launch

    def counted(batch: Batch) -> Launched:
        nonlocal num_shortages
        try:
            return launch(batch)
        except OutOfMemory:
            num_shortages += 1
            raise

    with patch.object(runner, "launch", counted):
        run_ours(runner, jobs, temperature=0.0)
        while runner.has_preparations:
            runner.prepare()
    return num_shortages
