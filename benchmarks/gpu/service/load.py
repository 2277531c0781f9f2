"""Load for a worker process, and figures from its job history. Needs the client's and the worker's packages."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import redis

from benchmarks.engine.bare import Job
from benchmarks.gpu.folders import random_folder, shape_of
from benchmarks.gpu.peers.engines import empty_device, load_runner, num_wanted, options_of, warm_s
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from benchmarks.service.load import run_jobs
from benchmarks.service.parts import num_done, own_server, percentile, wait_until, worker
from sluice.producer.client import Producer
from sluice.producer.contract.jobs import Job as QueuedJob
from sluice.producer.contract.jobs import job as queued_job
from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.transport import embedded
from sluice.producer.history.queries import JobRow

KEYS = QueueKeys("default")
Context = AbstractContextManager[object]
START_LIMIT_S = 90.0
RATES = (0.5, 0.8, 0.95)
"""Arrival rates, as shares of the bare engine's throughput."""

SETTLE_S = 3.0
"""A pause after the first load, in which the worker records the steps that it wanted."""


def lines(scale: Scale) -> Iterator[Line]:
    """Saturated, then at each rate."""
    jobs = service_jobs(scale)
    max_num_seqs = 4 if scale.is_toy else 256
    with random_folder(scale, has_tokenizer=True) as folder:
        runner = load_runner(scale, folder, max_num_seqs=max_num_seqs)
        engine_s = warm_s(runner, jobs, max_num_seqs=max_num_seqs, temperature=0.0)
        del runner
        empty_device(scale)
        with own_server() as state, Producer() as producer:
            device = ("--gpu", "0") if scale.device.type == "cuda" else ("--cpu",)
            log = state / "worker.log"
            start = partial(worker, *_flags(scale, folder, max_num_seqs), log=log, device=device, limit_s=START_LIMIT_S)
            try:
                with start():
                    yield _saturated(scale, producer, jobs, engine_s)
                    for share in RATES[:1] if scale.is_toy else RATES:
                        yield _poisson(scale, producer, share, len(jobs) / engine_s)
                yield _killed(producer, jobs[: 2 * max_num_seqs], state, start)
            except RuntimeError as error:
                raise RuntimeError(f"{error}; its log ends: {_tail(log)}") from error


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
        "--model": folder,
        "--num-blocks": options.num_blocks,
        "--max-model-len": options.max_model_len,
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": options.max_num_batched_tokens,
    }
    return (*(str(part) for pair in named.items() for part in pair), "--no-enable-prefix-caching")


def _saturated(scale: Scale, producer: Producer, jobs: Sequence[Job], engine_s: float) -> Line:
    """Run all jobs at once, the better of two runs, as for the engine."""
    run_jobs(producer, jobs)
    if not scale.is_toy:
        # The worker does not report when it has used its pause.
        time.sleep(SETTLE_S)
    service_s = min(run_jobs(producer, jobs) for _ in range(2))
    figures: dict[str, float | str] = {
        "tokens/s": num_wanted(jobs) / service_s,
        "engine's": num_wanted(jobs) / engine_s,
        "cost": 1 - engine_s / service_s,
    }
    return Line(f"saturated service, {shape_of(scale)}, {len(jobs)} jobs", figures)


def _poisson(scale: Scale, producer: Producer, share: float, engine_rate: float) -> Line:
    """Run jobs with exponential gaps for some seconds; times by the server's clock, from the job history."""
    random, seconds, rate = Random(1), 0.2 if scale.is_toy else 6.0, share * engine_rate
    batch = f"poisson-{share:g}"
    some = service_jobs(scale)
    due_s = [random.expovariate(rate)]
    while due_s[-1] < seconds or len(due_s) < 2:
        due_s.append(due_s[-1] + random.expovariate(rate))
    wanted = [
        queued_job(job.prompt, max_tokens=job.num_output_tokens, temperature=0, ignore_eos=True, batch=batch)
        for job in (random.choice(some) for _ in due_s)
    ]
    before = num_done(producer)
    _submit_when_due(producer, wanted, due_s)
    wait_until(lambda: num_done(producer) - before == len(wanted), "all jobs to be done", every_s=0.05, limit_s=60)
    wait_until(lambda: len(_done(producer, batch)) == len(wanted), "the history to have them", every_s=0.1, limit_s=20)
    return Line(f"Poisson at {share:.0%} of the engine's rate", load_figures(_done(producer, batch)))


def _killed(producer: Producer, jobs: Sequence[Job], state: Path, start: Callable[[], Context]) -> Line:
    """Kill the worker amid the jobs, and start another. Wrong if a job is not done in the end."""
    wanted = [queued_job(job.prompt, max_tokens=job.num_output_tokens, temperature=0, ignore_eos=True) for job in jobs]
    before = num_done(producer)
    with start():
        began_s = time.monotonic()
        receipts = producer.submit_many(wanted)
        is_complete = not any(isinstance(receipt, Exception) for receipt in receipts)
        wait_until(lambda: num_done(producer) > before, "the first job to be done")
        os.kill(_worker_pid(state), signal.SIGKILL)
        num_before_kill = num_done(producer) - before
    with start():
        started_s = time.monotonic()
        wait_until(lambda: num_done(producer) - before >= len(jobs), "all jobs to be done", limit_s=60)
    figures: dict[str, float | str] = {
        "jobs": len(jobs),
        "done before": num_before_kill,
        "done": num_done(producer) - before,
        "s until the other was ready": started_s - began_s,
        "s until all were done": time.monotonic() - started_s,
    }
    return Line("worker killed by SIGKILL amid jobs", figures, is_complete and figures["done"] == len(jobs))


def _worker_pid(state: Path) -> int:
    """Return the process that computes; the one that was started is its parent."""
    client: Any = redis.Redis(unix_socket_path=str(embedded.ensure(state).socket_path))  # its replies are untyped
    # Scored by when each is believed dead: an ended one may still be listed.
    (incarnation,) = client.zrange(KEYS.key("alive"), -1, -1)
    return int(client.hget(KEYS.key("worker", incarnation.decode()), "pid"))


def _submit_when_due(producer: Producer, wanted: Sequence[QueuedJob], due_s: Sequence[float]) -> None:
    """Submit each job at its time, due ones together."""
    began_s, at = time.monotonic(), 0
    while at < len(wanted):
        time.sleep(max(0.0, began_s + due_s[at] - time.monotonic()))
        now_s = time.monotonic() - began_s
        num_due = next((n for n, due in enumerate(due_s[at:]) if due > now_s), len(due_s) - at)
        for answer in producer.submit_many(wanted[at : at + num_due]):
            if isinstance(answer, Exception):
                raise answer
        at += num_due


def _done(producer: Producer, batch: str) -> list[JobRow]:
    return producer.jobs(batch=batch, state="done", limit=100_000)


def load_figures(rows: Sequence[JobRow]) -> dict[str, float | str]:
    """Return rates and times of completed jobs."""
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
        known = [1000 * value for value in values if value is not None]
        figures |= {f"{name} p50 ms": percentile(known, 50), f"{name} p99 ms": percentile(known, 99)}
    return figures | {"from": "the job history"}


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-3:]) if log.exists() else "nothing"
