"""Trace an engine: marks on the stages of its steps next to torch's profiler, on one clock. Knows no queue."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.trace.marks import Event, Marks, Place, events_of
from sluice.engine.execution import launched, model_runner
from sluice.engine.execution.sampling.sampler import Sampler
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.scheduling import scheduler
from sluice.engine.text.output import Outputs

ENGINE_PLACES = (
    Place(LLMEngine, "step", "step"),
    Place(LLMEngine, "step_overlapped", "step"),
    Place(scheduler.Scheduler, "schedule", "plan"),
    Place(model_runner.ModelRunner, "_lay_out", "lay out"),
    Place(model_runner.ModelRunner, "_fill", "lay out"),
    Place(model_runner.GraphedDecoder, "forward", "forward"),
    Place(model_runner.ModelRunner, "forward", "forward"),
    Place(Sampler, "sample", "sample"),
    Place(launched.LaunchedStep, "collect", "wait"),
    Place(scheduler.Scheduler, "commit", "commit"),
    Place(Outputs, "read", "text"),
)
SYNC = "sluice: both clocks"


class Tracing:
    """Our marks next to torch's profiler. Mark places, run something once, then read the events."""

    def __init__(self, *, on_card: bool) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_card:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self.marks = Marks()
        self._zero_ns = 0

    def around(self, loop: Callable[[], Any]) -> None:
        """Run `loop` under the profiler."""
        with self._profiler:
            self._zero_ns = time.perf_counter_ns()
            with torch.profiler.record_function(SYNC):
                pass
            loop()

    def events(self) -> list[Event]:
        """Return the events of both, on one clock."""
        with tempfile.TemporaryDirectory() as folder:
            self._profiler.export_chrome_trace(str(path := Path(folder) / "torch.json"))
            theirs: list[Event] = json.loads(path.read_text())["traceEvents"]
        return merged(theirs, self.marks, zero_ns=self._zero_ns)


def merged(theirs: Sequence[Event], marks: Marks, *, zero_ns: int) -> list[Event]:
    """Merge the profiler's events and ours, on the profiler's clock: at `zero_ns` of ours it recorded the event SYNC.

    Raises:
        ValueError: it did not.
    """
    began_us = next((event["ts"] for event in theirs if event.get("name") == SYNC and event.get("ph") == "X"), None)
    if began_us is None:
        raise ValueError(f"the profiler's trace has no event {SYNC!r}")
    return [*theirs, *events_of(marks.spans, zero_ns=zero_ns - round(began_us * 1000))]
