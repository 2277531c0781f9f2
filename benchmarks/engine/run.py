"""The bare engine on this CPU, compared with its bound.

    python -m benchmarks engine [--sections speed,scheduler,profile] [--threads N] [--spin]
                                [--quantization none|int8|int4] [--context TOKENS]

speed: 48 requests on the random model `llama-100m`, greedy, end-of-sequence ignored, no prefix cache. Useful tokens per
second, the better of two runs, with 16 and with 48 sequences and with one request of 128 + 128 tokens alone; below each
the matrix products alone: the same steps without everything else, the bound of any engine with these products.

scheduler: the engine's own Python per step, over the null model (`benchmarks/engine/scheduler.py`).

profile: time of each operation of a step, compared with its lower bound (`benchmarks/engine/profile.py`).

Compare only rows of one run, on an otherwise idle machine. `benchmarks engines` compares with other engines.
"""

import argparse
import os
import resource

import torch

from benchmarks.engine.bare import (
    MAX_NUM_BATCHED_TOKENS,
    RecordingRunner,
    best_of_two_s,
    jobs_of,
    num_wanted,
    run_products,
    run_recorded,
    wait_as_a_worker,
)
from benchmarks.engine.models import model_folder
from benchmarks.engine.profile import print_profile
from benchmarks.engine.scheduler import print_steps
from benchmarks.native_kernels import require_native_kernels
from benchmarks.tables import table
from sluice.engine.config import Quantization
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner

SECTIONS = ("speed", "scheduler", "profile")


def print_speed(quantization: Quantization) -> None:
    """Print the engine's rows, each beside its bound."""
    options = ModelOptions(
        path=model_folder(),
        quantization=quantization,
        num_blocks=2048,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    runner = RecordingRunner(load_model_runner(options))
    rows = [("sequences", "tokens/s", "products alone", "share")]
    for max_num_seqs in (1, 16, 48):
        jobs = jobs_of(max_num_seqs)
        ours_s = best_of_two_s(lambda jobs=jobs, at=max_num_seqs: run_recorded(runner, jobs, at))
        products_s = best_of_two_s(lambda: run_products(runner))
        rates = [f"{num_wanted(jobs) / seconds:.0f}" for seconds in (ours_s, products_s)]
        rows.append((f"{max_num_seqs}", *rates, f"{products_s / ours_s:.0%}"))
    print(table(rows))
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)} (default all)")
    parser.add_argument("--spin", action="store_true", help="let waiting threads spin, as OpenMP does by default")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of torch and the kernels")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none", help="weights")
    parser.add_argument("--context", type=int, default=200, help="tokens of each sequence that decodes in the profile")
    given = parser.parse_args()
    if not given.spin:
        wait_as_a_worker("engine")
    require_native_kernels()
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, {given.threads} threads, load {os.getloadavg()[0]:.1f} before the start\n")
    sections = given.sections.split(",")
    if "speed" in sections:
        print_speed(given.quantization)
    if "scheduler" in sections:
        print_steps()
    if "profile" in sections:
        print_profile(given.quantization, given.context)


if __name__ == "__main__":
    main()
