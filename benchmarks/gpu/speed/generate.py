"""Tokens per second of our engine, end to end: section "generate" of `benchmarks gpu`.

Random weights on the device, prompts of 128 tokens, 128 more each, greedy, without a prefix cache. Each number of
requests at once is run after a warm-up that records its steps; the better of two runs counts.
"""

from collections.abc import Iterator
from functools import partial
from random import Random

from benchmarks.engine.bare import Job, num_wanted
from benchmarks.gpu.engines import empty_device, random_runner, warm_s
from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale


def groups(scale: Scale) -> Groups:
    """Return a small and a large model."""
    return {shape: partial(_lines, scale, shape) for shape in (["toy"] if scale.is_toy else ["0.6B", "8B"])}


def _lines(scale: Scale, shape: str) -> Iterator[Line]:
    counts = scale.pick([2**power for power in range(9)], [1, 4])
    length, random = 8 if scale.is_toy else 128, Random(0)
    runner = random_runner(scale, shape, max_num_seqs=max(counts))
    for count in counts:
        jobs = [Job(tuple(random.randrange(2, 300) for _ in range(length)), length) for _ in range(count)]
        seconds = warm_s(runner, jobs, temperature=0.0)
        figures: dict[str, float | str] = {
            "tokens/s": num_wanted(jobs) / seconds,
            "ms per token of each": 1e3 * seconds / length,
            "s": seconds,
            "output tokens": num_wanted(jobs),
            "prompt tokens": count * length,
        }
        yield Line(f"{shape}, {count} at once", figures)
    del runner
    empty_device(scale)
