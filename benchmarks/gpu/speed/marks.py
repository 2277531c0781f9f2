"""What an engine and its device do, as bars over time: marks on the stages of steps, next to torch's profiler."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sluice.engine.execution import model_runner
from sluice.engine.execution.sampling.sampler import Sampler
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.scheduling import scheduler
from sluice.engine.text.output import Outputs

SYNC = "sluice: both clocks"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the profiler's device events."""


class Bar(NamedTuple):
    """One run of one stage, or of something on the device."""

    name: str
    began_us: float
    ended_us: float


class Place(NamedTuple):
    """A function that is a stage, and where its callers find it."""

    owner: Any  # a class or a module
    attribute: str
    name: str


PLACES = (
    Place(LLMEngine, "step", "step"),
    Place(LLMEngine, "step_overlapped", "step"),
    Place(scheduler.Scheduler, "schedule", "plan"),
    Place(model_runner.ModelRunner, "_lay_out", "lay out"),
    Place(model_runner.ModelRunner, "_fill", "lay out"),
    Place(model_runner.GraphedDecoder, "forward", "forward"),
    Place(model_runner.ModelRunner, "forward", "forward"),
    Place(Sampler, "sample", "sample"),
    Place(model_runner.LaunchedStep, "collect", "wait"),
    Place(scheduler.Scheduler, "commit", "commit"),
    Place(Outputs, "read", "text"),
)
"""The stages of a step."""


@contextmanager
def marked(places: Sequence[Place] = PLACES) -> Iterator[list[Bar]]:
    """Collect the runs of these functions for the duration of the context, by time.perf_counter."""
    bars: list[Bar] = []
    before = [getattr(place.owner, place.attribute) for place in places]
    for place, function in zip(places, before, strict=True):
        setattr(place.owner, place.attribute, _marking(bars, place.name, function))
    try:
        yield bars
    finally:
        for place, function in zip(places, before, strict=True):
            setattr(place.owner, place.attribute, function)


def _marking(bars: list[Bar], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def marking(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - handed through
        began_ns = time.perf_counter_ns()
        try:
            return function(*arguments, **options)
        finally:
            bars.append(Bar(name, began_ns / 1000, time.perf_counter_ns() / 1000))

    return marking


def profiled(run: Callable[[], object]) -> tuple[list[Bar], list[Bar]]:
    """Return the stages of a run, and what the GPU did meanwhile, on one clock. The profiler slows the host."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with marked() as bars, torch.profiler.profile(activities=activities) as profiler:
        sync_us = time.perf_counter_ns() / 1000
        with torch.profiler.record_function(SYNC):
            pass
        run()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(path := Path(folder) / "torch.json"))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return bars, device_bars(events, sync_us)


def device_bars(events: Sequence[dict[str, Any]], sync_us: float) -> list[Bar]:
    """Return the profiler's device events on our clock: at `sync_us` of ours it recorded the event SYNC.

    Raises:
        ValueError: it did not.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    offset_us = next((sync_us - event["ts"] for event in complete if event.get("name") == SYNC), None)
    if offset_us is None:
        raise ValueError(f"the profiler's trace has no event {SYNC!r}")
    return [
        Bar(event["name"], event["ts"] + offset_us, event["ts"] + event["dur"] + offset_us)
        for event in complete
        if event.get("cat") in ON_DEVICE
    ]
