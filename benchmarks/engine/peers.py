"""Throughput on this CPU, bare and as a whole service, compared with other engines.

    python -m benchmarks cpu [--peers all|none|installed|NAME,NAME] [--shapes llama-100m,qwen2-500m]
                             [--weights bf16,int8] [--rounds 5]

48 requests (7,509 prompt and 3,580 output tokens; one: 128 in, 128 out) on a random model, greedy, end-of-sequence
ignored, no prefix cache, with 16 and 48 sequences at once and with one; in bf16, or with weights in int8 where an
engine supports them. Every engine is a separate process that is already loaded; runs alternate, the first of each is
not counted; medians of tokens per second are printed, with minimum and maximum. `service` is ours with Redis, history
and channels: from the first scheduled to the last end.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Literal

from benchmarks.engine.bare import MAX_NUM_BATCHED_TOKENS, Job, RecordingRunner, make_jobs, run_ours
from benchmarks.engine.models import SHAPES, model_folder
from benchmarks.native_kernels import require_native_kernels
from benchmarks.peers.engine_side import PEERS, Serving, installed, serving, write_work
from benchmarks.service.load import batching, run_jobs
from benchmarks.service.parts import own_server, worker
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.execution.threads import SPINS
from sluice.producer.client import Producer

CASES = (16, 48, 1)
QUANTIZATION: Mapping[str, Literal["none", "int8"]] = {"bf16": "none", "int8": "int8"}
ROOT = Path(__file__).parents[2]
OUR_WAITING = {"GOMP_SPINCOUNT": SPINS}
Run = Callable[[], float]


def jobs_of(max_num_seqs: int) -> list[Job]:
    """Return the requests of a case."""
    jobs = make_jobs()
    return jobs if max_num_seqs > 1 else [Job(jobs[-2].prompt[:128], 128)]


def serve_ours(model: Path, weights: str, max_num_seqs: int, dtype: str) -> None:
    """The bare engine as a serving process, like the peers'."""
    options = ModelOptions(
        path=model,
        device="cpu",
        dtype=dtype,
        quantization=QUANTIZATION[weights],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    runner, jobs = RecordingRunner(load_model_runner(options)), jobs_of(max_num_seqs)
    print("ready", flush=True)
    for _ in sys.stdin:
        began_s = time.perf_counter()
        run_ours(runner, jobs, max_num_seqs)
        print(time.perf_counter() - began_s, flush=True)


def open_service(stack: ExitStack, model: Path, weights: str, max_num_seqs: int) -> Run:
    """Our whole service."""
    flags = ("--model", str(model), "--quantization", QUANTIZATION[weights], *batching(max_num_seqs))
    folder = stack.enter_context(own_server())
    producer = stack.enter_context(Producer())
    stack.enter_context(worker(*flags, log=folder / "worker.log"))
    return lambda: run_jobs(producer, jobs_of(max_num_seqs))


def open_bare(stack: ExitStack, model: Path, weights: str, max_num_seqs: int, folder: Path) -> Run:
    """Our bare engine."""
    command = [sys.executable, "-m", "benchmarks.engine.peers", "--serve", str(model), weights, str(max_num_seqs)]
    # The bare engine uses the worker's wait policy; peers keep their own.
    return stack.enter_context(Serving(command, ROOT, OUR_WAITING, folder / "ours.log")).run_s


def measure(
    shape: str, weights: str, max_num_seqs: int, peers: Sequence[str], num_rounds: int
) -> dict[str, list[float]]:
    """Return tokens per second of each, round by round, all loaded at once, in alternation."""
    model, jobs = model_folder(shape), jobs_of(max_num_seqs)
    num_tokens = sum(job.num_output_tokens for job in jobs)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work = folder / "work.json"
        write_work(work, model, weights, max_num_seqs, [(job.prompt, job.num_output_tokens) for job in jobs])
        runs: dict[str, Run] = {
            "ours, bare engine": open_bare(stack, model, weights, max_num_seqs, folder),
            "ours, service": open_service(stack, model, weights, max_num_seqs),
        }
        if weights != "bf16":
            runs["ours, bare engine, bf16"] = open_bare(stack, model, "bf16", max_num_seqs, folder)
        for name in peers:
            if weights == "bf16" or PEERS[name].has_int8:
                runs[name] = stack.enter_context(serving(PEERS[name], model, weights, work)).run_s
        rounds = [run_round(number, runs, num_tokens) for number in range(1 + num_rounds)]
    return {name: [one[name] for one in rounds[1:]] for name in runs}


def run_round(number: int, runs: Mapping[str, Run], num_tokens: int) -> dict[str, float]:
    """Measure tokens per second of each in one round, printed at once: a table takes many minutes."""
    rates = {name: num_tokens / run() for name, run in runs.items()}
    said = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    print(f"  round {number}{'' if number else ', not counted'}: {said}", file=sys.stderr, flush=True)
    return rates


def print_case(shape: str, weights: str, max_num_seqs: int, found: dict[str, list[float]]) -> None:
    """Print the table of one case; ratios are within a round."""
    ours = found["ours, service"]
    print(
        f"\n{shape}, {weights}, {max_num_seqs} at once: {'tokens/s':>16} {'least':>7} {'most':>7} {'service / it':>13}"
    )
    for name, rates in found.items():
        ratio = statistics.median(mine / other for mine, other in zip(ours, rates, strict=True))
        middle = statistics.median(rates)
        print(f"  {name:40} {middle:8.0f} {min(rates):7.0f} {max(rates):7.0f} {ratio:13.2f}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", default="installed", help=f"all, none, installed, or of {', '.join(PEERS)}")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)} (default all)")
    parser.add_argument("--cases", default=",".join(map(str, CASES)), help="sequences at once (default 16,48,1)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, in turns (default 5)")
    parser.add_argument("--weights", default="bf16", help="of bf16, int8 (default bf16)")
    parser.add_argument("--serve", nargs=3, metavar=("MODEL", "WEIGHTS", "SEQUENCES"), help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="auto", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_ours(Path(given.serve[0]), given.serve[1], int(given.serve[2]), given.dtype)
        return
    require_native_kernels()
    shorthands = {"all": list(PEERS), "none": list[str](), "installed": installed()}
    peers = shorthands[given.peers] if given.peers in shorthands else given.peers.split(",")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    cases = product(given.shapes.split(","), given.weights.split(","), map(int, given.cases.split(",")))
    for shape, weights, case in cases:
        print_case(shape, weights, case, measure(shape, weights, case, peers, given.rounds))


if __name__ == "__main__":
    main()
