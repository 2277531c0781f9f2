"""The whole service compared with the bare engine, in the same run: section "service" of `benchmarks gpu`.

A worker process on the GPU, its queue on a server of its own (append-only file), its history in SQLite. First
saturated, all jobs at once; then Poisson arrivals at fractions of the bare engine's throughput; then a worker killed
during jobs. Needs the client's and the worker's packages, which a machine with a GPU may lack.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from benchmarks.engine.bare import Job, num_wanted
from benchmarks.gpu.engines import empty_device, options_of, random_folder, shape_of, warm_s
from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from sluice.engine.execution.start.model_loading import load_model_runner

if TYPE_CHECKING:
    from benchmarks.processes import Server
    from sluice.history.queries import JobRow
    from sluice.producer.client import Producer

START_LIMIT_S = 90.0
RATES = (0.5, 0.8, 0.95)
"""Arrival rates, as shares of the bare engine's throughput."""

SETTLE_S = 3.0
"""A pause after the first load, in which the worker records the steps that it wanted."""


def groups(scale: Scale) -> Groups:
    """Return one group: a line with the missing component, or the service's cost and waiting times."""
    return {"service": lambda: _service(scale)}


def _service(scale: Scale) -> Iterator[Line]:
    try:
        from benchmarks.processes import version_of_server
        from sluice.producer.errors import EmbeddedServerError
    except ImportError as error:
        yield Line("service", {"note": f"not present: the package {error.name}"})
        return
    try:
        version_of_server()
    except EmbeddedServerError as error:
        yield Line("service", {"note": f"not present: {error}"})
        return
    yield from _lines(scale)


def _lines(scale: Scale) -> Iterator[Line]:
    """Saturated, then at each rate, then killed."""
    from benchmarks.processes import server, worker
    from sluice.producer.client import Producer

    jobs = service_jobs(scale)
    max_num_seqs = 4 if scale.is_toy else 256
    with random_folder(scale, has_tokenizer=True) as folder:
        runner = load_model_runner(options_of(scale, folder, max_num_seqs=max_num_seqs))
        engine_s = warm_s(runner, jobs, max_num_seqs=max_num_seqs, temperature=0.0)
        del runner
        empty_device(scale)
        with server() as here, Producer() as producer:
            device = ("--gpu", "0") if scale.device.type == "cuda" else ("--cpu",)
            flags = _flags(scale, folder, max_num_seqs)
            start = partial(worker, here, *flags, model=str(folder), device=device, limit_s=START_LIMIT_S)
            try:
                with start():
                    yield _saturated(scale, here, producer, jobs, engine_s)
                    for share in RATES[:1] if scale.is_toy else RATES:
                        yield _poisson(scale, here, producer, share, len(jobs) / engine_s)
                yield _killed(here, producer, jobs[: 2 * max_num_seqs], start)
            except RuntimeError as error:
                tail = (here.folder / "worker.log").read_text(errors="replace").splitlines()[-3:]
                raise RuntimeError(f"{error}; its log ends: {' | '.join(tail)}") from error


def service_jobs(scale: Scale) -> list[Job]:
    """Return six times as many jobs as run at once, of 32 to 256 prompt tokens and 64 to 192 more."""
    random, sizes = Random(0), ((4, 8), (4, 8)) if scale.is_toy else ((32, 256), (64, 192))
    (least_prompt, most_prompt), outputs = sizes

    def prompt() -> tuple[int, ...]:
        return tuple(random.randrange(2, 300) for _ in range(random.randint(least_prompt, most_prompt)))

    return [Job(prompt(), random.randint(*outputs)) for _ in range(24 if scale.is_toy else 1536)]


def _flags(scale: Scale, folder: Path, max_num_seqs: int) -> tuple[str, ...]:
    """Return the worker's settings for the same batching as the bare engine's."""
    options = options_of(scale, folder, max_num_seqs=max_num_seqs)
    named = {
        "--num-blocks": options.num_blocks,
        "--max-model-len": options.max_model_len,
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": options.max_num_batched_tokens,
    }
    return (*(str(part) for pair in named.items() for part in pair), "--no-enable-prefix-caching")


def _saturated(scale: Scale, here: "Server", producer: "Producer", jobs: Sequence[Job], engine_s: float) -> Line:
    """Run all jobs at once, the better of two runs, as for the engine."""
    from benchmarks.service.load import run_through

    run_through(here, producer, jobs)
    if not scale.is_toy:
        # The worker does not report when it has used its pause.
        time.sleep(SETTLE_S)
    service_s = min(run_through(here, producer, jobs) for _ in range(2))
    figures: dict[str, float | str] = {
        "tokens/s": num_wanted(jobs) / service_s,
        "engine's": num_wanted(jobs) / engine_s,
        "cost": 1 - engine_s / service_s,
    }
    return Line(f"saturated service, {shape_of(scale)}, {len(jobs)} jobs", figures)


def _poisson(scale: Scale, here: "Server", producer: "Producer", share: float, engine_rate: float) -> Line:
    """Run jobs with exponential gaps for some seconds; times by the server's clock, from the job history."""
    from benchmarks.processes import wait_until

    random, seconds, rate = Random(1), 0.2 if scale.is_toy else 6.0, share * engine_rate
    some, batch, before = service_jobs(scale), f"poisson-{share:g}", here.count("done")
    began_s, due_s, num_jobs = time.monotonic(), 0.0, 0
    while due_s < seconds or num_jobs < 2:
        due_s += random.expovariate(rate)
        time.sleep(max(0.0, began_s + due_s - time.monotonic()))
        _submit(producer, [random.choice(some)], batch=batch)
        num_jobs += 1

    def done() -> "Sequence[JobRow]":
        return producer.jobs(batch=batch, state="done", limit=100_000)

    wait_until(lambda: here.count("done") - before == num_jobs, "all jobs to be done", every_s=0.05, limit_s=60)
    wait_until(lambda: len(done()) == num_jobs, "the history to have them", every_s=0.1, limit_s=20)
    return Line(f"Poisson at {share:.0%} of the engine's rate", load_figures(done()))


def _submit(producer: "Producer", jobs: Sequence[Job], *, batch: str | None = None) -> None:
    from sluice.protocol.jobs import job as queued_job

    wanted = [
        queued_job(job.prompt, max_tokens=job.num_output_tokens, temperature=0, ignore_eos=True, batch=batch)
        for job in jobs
    ]
    for answer in producer.submit_many(wanted):
        if isinstance(answer, Exception):
            raise answer


def _killed(
    here: "Server", producer: "Producer", jobs: Sequence[Job], start: "Callable[[], AbstractContextManager[object]]"
) -> Line:
    """Kill the worker during the jobs, and start another. Wrong if a job is not done in the end."""
    from benchmarks.processes import wait_until

    before = here.count("done")
    with start():
        began_s = time.monotonic()
        _submit(producer, jobs)
        wait_until(lambda: here.count("done") > before, "the first job to be done")
        os.kill(_worker_pid(here), signal.SIGKILL)
        num_before_kill = here.count("done") - before
    with start():
        started_s = time.monotonic()
        wait_until(lambda: here.count("done") - before >= len(jobs), "all jobs to be done", limit_s=60)
    figures: dict[str, float | str] = {
        "jobs": len(jobs),
        "done before": num_before_kill,
        "done": here.count("done") - before,
        "s until the other was ready": started_s - began_s,
        "s until all were done": time.monotonic() - started_s,
    }
    return Line("worker killed by SIGKILL amid jobs", figures, figures["done"] == len(jobs))


def _worker_pid(here: "Server") -> int:
    """Return the process that computes; the one that was started is its parent."""
    from sluice.protocol.keys import QueueKeys

    keys = QueueKeys("default")
    # Scored by when each is believed dead: an ended one may still be listed.
    (incarnation,) = here.client.zrange(keys.key("alive"), -1, -1)
    return int(here.client.hget(keys.key("worker", incarnation.decode()), "pid"))


def load_figures(rows: "Sequence[JobRow]") -> dict[str, float | str]:
    """Return rates and times of completed jobs."""
    from sluice.history.percentiles import percentile

    submitted = [row.submitted_ms or 0 for row in rows]
    begin_ms, end_ms = min(submitted), max(row.finished_ms or 0 for row in rows)
    busy_s = (end_ms - begin_ms) / 1000
    offered_s = (max(submitted) - begin_ms) / 1000
    figures: dict[str, float | str] = {
        "jobs": len(rows),
        "offered/s": (len(rows) - 1) / offered_s if offered_s else float("nan"),
        "done/s": len(rows) / busy_s,
        "tokens/s": sum(row.output_tokens or 0 for row in rows) / busy_s,
    }
    times = {"TTFT": [row.ttft_s for row in rows], "TPOT": [row.tpot_s for row in rows]}
    for name, values in times.items():
        known = sorted(1000 * value for value in values if value is not None)
        figures |= {f"{name} p50 ms": percentile(known, 50), f"{name} p99 ms": percentile(known, 99)}
    return figures | {"from": "the job history"}
