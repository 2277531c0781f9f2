"""Throughput on this CPU beside busy processes, compared with other engines.

    python -m benchmarks neighbours [--peers all|none|installed|NAME,NAME] [--busy 0,1,2] [--rounds 3]
                                    [--sequences 16] [--dtype auto|float32]

A busy process computes without pause, at the same priority. The requests are those of `cpu` on the model of 100 M
parameters. Every engine is a separate process that is already loaded; runs alternate, and the numbers of busy processes
alternate within a round. Prints the median tokens per second, and the ratio to the same engine's run with no busy
process in the same round. Fair shares of two cores would leave an engine with two threads 0.67 beside one busy process
and 0.5 beside two.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.engine.models import model_folder
from benchmarks.engine.peers import OUR_WAITING, ROOT, Run, jobs_of
from benchmarks.native_kernels import require_native_kernels
from benchmarks.peers.engine_side import PEERS, Serving, installed, serving, write_work

SHAPE = "llama-100m"
Rates = dict[tuple[str, int], float]
"""Tokens per second, by engine and number of busy processes."""


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Run so many processes that compute without pause."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def open_runs(stack: ExitStack, peers: Sequence[str], max_num_seqs: int, dtype: str) -> dict[str, Run]:
    """Load all engines; return what runs each."""
    model, jobs = model_folder(SHAPE), jobs_of(max_num_seqs)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    work = folder / "work.json"
    write_work(work, model, "bf16", max_num_seqs, [(job.prompt, job.num_output_tokens) for job in jobs])
    serve = ["-m", "benchmarks.engine.peers", "--serve", str(model), "bf16", str(max_num_seqs), "--dtype", dtype]
    ours = Serving([sys.executable, *serve], ROOT, OUR_WAITING, folder / "ours.log")
    runs = {"ours": stack.enter_context(ours).run_s}
    for name in peers:
        runs[name] = stack.enter_context(serving(PEERS[name], model, "bf16", work)).run_s
    return runs


def run_round(runs: Mapping[str, Run], numbers: Sequence[int], num_tokens: int) -> Rates:
    """Measure each engine beside each number of busy processes."""
    rates: Rates = {}
    for name, run in runs.items():
        for number in numbers:
            with busy_processes(number):
                rates[name, number] = num_tokens / run()
    said = ", ".join(f"{name} beside {number}: {rate:.0f}" for (name, number), rate in rates.items())
    print(f"  {said}", file=sys.stderr, flush=True)
    return rates


def print_table(names: Sequence[str], numbers: Sequence[int], rounds: Sequence[Rates]) -> None:
    """Print a row for each engine and number; ratios are within a round."""
    print(f"{'':<12} {'busy':>5} {'tokens/s':>9} {'of idle':>8} {'least':>6} {'most':>6}")
    for name in names:
        for number in numbers:
            ratios = [rates[name, number] / rates[name, numbers[0]] for rates in rounds]
            middle = statistics.median(rates[name, number] for rates in rounds)
            print(
                f"{name:<12} {number:>5} {middle:>9.0f} {statistics.median(ratios):>8.2f} "
                f"{min(ratios):>6.2f} {max(ratios):>6.2f}"
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", default="installed", help=f"all, none, installed, or of {', '.join(PEERS)}")
    parser.add_argument("--busy", default="0,1,2", help="numbers of busy processes, first the reference (0,1,2)")
    parser.add_argument("--sequences", type=int, default=16, help="sequences at once (default 16)")
    parser.add_argument("--dtype", default="auto", help="of our engine: auto or float32 (default auto)")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds (default 3)")
    given = parser.parse_args()
    require_native_kernels()
    shorthands = {"all": list(PEERS), "none": list[str](), "installed": installed()}
    peers = shorthands[given.peers] if given.peers in shorthands else given.peers.split(",")
    numbers = [int(number) for number in given.busy.split(",")]
    num_tokens = sum(job.num_output_tokens for job in jobs_of(given.sequences))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    with ExitStack() as stack:
        runs = open_runs(stack, peers, given.sequences, given.dtype)
        run_round(runs, numbers[:1], num_tokens)  # not counted
        rounds = [run_round(runs, numbers, num_tokens) for _ in range(given.rounds)]
    print_table(list(runs), numbers, rounds)


if __name__ == "__main__":
    main()
