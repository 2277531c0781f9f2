"""The service with the engine in its process, and in one of its own, compared with the engine alone.

    python -m benchmarks engine-process [--sequences 256] [--step-ms 2.5] [--host-ms 3] [--jobs 512] [--rounds 3]

The null model sleeps for a part of a step, as a GPU would compute, and keeps the interpreter busy for another, as
launching kernels does: a step of a 0.6 B model with 256 sequences took 5.5 to 8 ms on an H200 (docs/lab/gpu.md). So
this shows what the interpreter's lock costs, without a GPU. Jobs of 100 to 200 tokens, all submitted at once, nobody
reads; embedded server, recorder into SQLite. Runs alternate.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

from benchmarks.engine.bare import Job
from benchmarks.service.load import run_jobs
from benchmarks.service.parts import own_server, worker
from sluice.engine.config import EngineConfig
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import Request, SamplingParams
from sluice.producer.client import Producer

PROMPT = tuple(b"What is a sluice?")


def jobs_of(count: int) -> list[Job]:
    """Return jobs of 100 to 200 tokens."""
    return [Job(PROMPT, 100 + number * 37 % 101) for number in range(count)]


def alone_s(jobs: list[Job], num_seqs: int, null: NullModelConfig) -> float:
    """Run the jobs on an engine alone; return seconds."""
    engine = LLMEngine(NullModel(null), NullTokenizer(), EngineConfig(max_num_seqs=num_seqs))
    began_s = time.perf_counter()
    engine.add(
        Request(
            id=str(number),
            prompt_token_ids=job.prompt,
            sampling=SamplingParams(temperature=0, max_tokens=job.num_output_tokens, ignore_eos=True),
        )
        for number, job in enumerate(jobs)
    )
    while not engine.is_idle:
        engine.advance()
    return time.perf_counter() - began_s


def service_s(jobs: list[Job], num_seqs: int, null: NullModelConfig, which: str) -> float:
    """Run the jobs through a service; return seconds from the first scheduled to the last end, of the second run."""
    model = f"null?step_s={null.step_s}&host_s={null.host_s}"
    flags = ("--model", model, "--max-num-seqs", str(num_seqs), "--engine-process", which)
    with own_server() as folder, Producer() as producer, worker(*flags, log=Path(folder) / "worker.log"):
        run_jobs(producer, jobs)
        return run_jobs(producer, jobs)


def main() -> None:
    """Print a line for each round, and the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=256, help="sequences at once (default 256)")
    parser.add_argument("--step-ms", type=float, default=2.5, help="sleep of a step (default 2.5)")
    parser.add_argument("--host-ms", type=float, default=3.0, help="busy time of a step (default 3)")
    parser.add_argument("--jobs", type=int, default=512, help="jobs (default 512)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default 3)")
    given = parser.parse_args()
    jobs = jobs_of(given.jobs)
    null = NullModelConfig(step_s=given.step_ms / 1000, host_s=given.host_ms / 1000)
    num_tokens = sum(job.num_output_tokens for job in jobs)
    print(
        f"tokens/s, load {os.getloadavg()[0]:.1f} before\n{'alone':>9} {'one process':>12} {'its own':>9}", flush=True
    )
    rounds: list[tuple[float, float, float]] = []
    for _ in range(given.rounds):
        alone = alone_s(jobs, given.sequences, null)
        off, on = (service_s(jobs, given.sequences, null, which) for which in ("off", "on"))
        rounds.append((alone, off, on))
        print(f"{num_tokens / alone:9.0f} {num_tokens / off:12.0f} {num_tokens / on:9.0f}", flush=True)
    shares = [statistics.median(alone / took[which] for alone, *took in rounds) for which in (0, 1)]
    print(f"of the engine alone, medians: {shares[0]:.3f} in one process, {shares[1]:.3f} in a process of its own")


if __name__ == "__main__":
    main()
