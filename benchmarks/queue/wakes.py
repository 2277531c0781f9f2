"""Wake-up of an idle worker: from before a submit to the first step of its job, one job at a time.

`python -m benchmarks.queue.wakes start …` is the worker, which writes when each job is first computed.
"""

import os
import time
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.processes import environment, server, wait_until, worker
from benchmarks.queue.ours import NULL, PROMPT
from sluice.engine.batch import Batch
from sluice.engine.executor import Computed
from sluice.engine.null_model import NullModel
from sluice.producer.client import Producer
from sluice.worker.cli import main

STARTS = "BENCHMARK_STARTS"
"""The environment variable with the path of what the worker writes: a job and a time in nanoseconds a line."""

LEAST_PAUSE_S, MOST_PAUSE_S = 0.005, 0.02
"""Between the first step of a job and the next submit, so that the worker is idle again. Of random length: equal ones
would meet its heartbeats and rounds always at the same point."""


def wakes_ms(num_jobs: int) -> list[float]:
    """Return the milliseconds of each wake-up, ascending."""
    random, submitted_ns = Random(0), dict[str, int]()
    with server() as here, Producer() as producer, environment({STARTS: str(here.folder / "starts")}):
        starts = here.folder / "starts"
        with worker(here, *NULL, module="benchmarks.queue.wakes", is_alone=True):
            for _ in range(num_jobs):
                size, began_ns = starts.stat().st_size, time.monotonic_ns()
                submitted_ns[producer.submit(PROMPT, max_tokens=1).id] = began_ns
                # A reader of the result would ask the server just when the worker pulls.
                wait_until(partial(_has_grown, starts, size), "the job's first step", every_s=0.001)
                time.sleep(random.uniform(LEAST_PAUSE_S, MOST_PAUSE_S))
        started = [line.split() for line in starts.read_text().splitlines()]
    return sorted((int(at_ns) - submitted_ns[job_id]) / 1e6 for job_id, at_ns in started)


def _has_grown(file: Path, size: int) -> bool:
    return file.stat().st_size > size


def _note_starts() -> None:
    """Let the null model write when it first computes a job. CLOCK_MONOTONIC is the same in every process."""
    launch, file = NullModel.launch, os.open(os.environ[STARTS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def noting(self: NullModel, batch: Batch) -> Computed:
        at_ns = time.monotonic_ns()
        for admission in batch.admissions:
            os.write(file, f"{admission.request_id.partition('#')[0]} {at_ns}\n".encode())
        return launch(self, batch)

    NullModel.launch = noting


if __name__ == "__main__":
    _note_starts()
    main()
