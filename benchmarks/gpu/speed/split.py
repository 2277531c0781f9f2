"""Time of a step's parts in a busy engine: section "split" of `benchmarks gpu`.

Two runs of the same requests, both after a warm-up. The first uses only our marks for the host's stages and the step's
duration. The second uses torch's profiler for the device's time per step; the profiler slows the host, so nothing else
of that run is used. Idle is the share of a step in which the device does not compute. On the CPU the model's forward
stands for the device.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from random import Random

from benchmarks.engine.bare import Job
from benchmarks.gpu.engines import empty_device, random_runner, run_ours, warm_up
from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.speed.marks import Bar, marked, profiled

STAGES = {"plan": "plan", "lay out": "layout", "forward": "launch", "sample": "launch", "wait": "wait"}
"""Marks by their names here; the rest of a step is commit, text, and the transitions between stages."""


def groups(scale: Scale) -> Groups:
    """Return decodes alone, and decodes with a steady flow of prompts, with a small and a large model."""
    return {shape: partial(_split, scale, shape) for shape in (["toy"] if scale.is_toy else ["0.6B", "8B"])}


def _split(scale: Scale, shape: str) -> Iterator[Line]:
    max_num_seqs = 4 if scale.is_toy else 64
    runner = random_runner(scale, shape, max_num_seqs=max_num_seqs)
    for name, jobs in _loads(scale, max_num_seqs).items():
        warm_up(runner, jobs, max_num_seqs=max_num_seqs)
        run = partial(run_ours, runner, jobs, max_num_seqs=max_num_seqs, temperature=0.0)
        yield _line(scale, f"{shape}, {max_num_seqs} at once, {name}", run)
    del runner
    empty_device(scale)


def _loads(scale: Scale, max_num_seqs: int) -> dict[str, list[Job]]:
    """Return requests whose middle steps are alike."""
    random = Random(0)

    def job(num_prompt_tokens: int, num_output_tokens: int) -> Job:
        return Job(tuple(random.randrange(2, 300) for _ in range(num_prompt_tokens)), num_output_tokens)

    prompt, outputs = (8, 8) if scale.is_toy else (128, 64)
    mixed = range(2 * max_num_seqs if scale.is_toy else 4 * max_num_seqs)
    return {
        "decodes": [job(prompt, outputs) for _ in range(max_num_seqs)],
        "prompts among decodes": [job(random.randint(4, 2 * prompt), random.randint(4, outputs)) for _ in mixed],
    }


def _line(scale: Scale, name: str, run: Callable[[], None]) -> Line:
    num_steps = 3 if scale.is_toy else 24
    with marked() as bars:
        run()
    figures = host_figures(bars, num_steps)
    if scale.device.type == "cpu":
        device_ms = busy_ms([bar for bar in bars if bar.name == "forward"], window_of(bars, num_steps)) / num_steps
    else:
        bars, on_device = profiled(run)
        device_ms = busy_ms(on_device, window_of(bars, num_steps)) / num_steps
    if device_ms == 0.0:
        return Line(name, figures | {"note": "not measured: the profiler saw no kernel"})
    return Line(name, figures | {"device": device_ms, "idle": max(0.0, 1 - device_ms / float(figures["step ms"]))})


def host_figures(bars: Sequence[Bar], num_steps: int) -> dict[str, float | str]:
    """Return milliseconds of a step, from its beginning to the next one's, and of its host stages; middle steps."""
    began_us, ended_us = window_of(bars, num_steps)
    stages = dict.fromkeys(STAGES.values(), 0.0)
    for bar in bars:
        if bar.name in STAGES and began_us <= bar.began_us < ended_us:
            stages[STAGES[bar.name]] += (bar.ended_us - bar.began_us) / 1000 / num_steps
    step_ms = (ended_us - began_us) / 1000 / num_steps
    return {"step ms": step_ms, **stages, "rest of host": step_ms - sum(stages.values())}


def busy_ms(bars: Sequence[Bar], window: tuple[float, float]) -> float:
    """Return milliseconds of a window in which any of the device's streams computes."""
    busy_us, at_us = 0.0, window[0]
    for bar in sorted(bars, key=lambda bar: bar.began_us):
        busy_us += max(0.0, min(bar.ended_us, window[1]) - max(bar.began_us, at_us))
        at_us = max(at_us, bar.ended_us)
    return busy_us / 1000


def window_of(bars: Sequence[Bar], num_steps: int) -> tuple[float, float]:
    """Return the span from the beginning of a middle step to that of a later one: gaps between steps count.

    Raises:
        ValueError: there are too few steps that compute.
    """
    computing = [bar.began_us for bar in bars if bar.name == "forward"]
    steps = sorted(bar for bar in bars if bar.name == "step")
    busy = [bar for bar in steps if any(bar.began_us <= at < bar.ended_us for at in computing)]
    if len(busy) < num_steps:
        raise ValueError(f"there are {len(busy)} steps that compute, not {num_steps}")
    first = (len(busy) - num_steps) // 2
    last = busy[first + num_steps - 1]
    after = next((later.began_us for step, later in pairwise(steps) if step == last), last.ended_us)
    return busy[first].began_us, after
