"""Cost of the service compared with the bare engine: throughput, wake-up, time to first token, start.

    python -m benchmarks service [--rounds 9] [--sequences 1,16,48] [--only-ratios]

The same 48 requests as `benchmarks engine` (random 125 M Llama shape, bf16; at one sequence four of 128 + 128 tokens),
by the bare engine in a separate process and through the whole service (embedded server with its append-only file,
worker process, recorder into SQLite, tokens on channels), alternating, each while the other is idle; every pair and the
median of their ratios. Neither speculates: a random model repeats itself, and drafts would hide the cost. Below them,
the processor time of everything but the step (`benchmarks beside`): it means the same on a busy machine. Wake-up is
measured with the null model: an idle worker, one job at a time, from before `submit` until the reader has the first
token.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.engine.bare import MAX_NUM_BATCHED_TOKENS, VOCAB_SIZE, RecordingRunner, model_folder, run_ours
from benchmarks.service.beside import Parts, header, measured_run, measured_worker, medians, row
from benchmarks.service.load import batching, jobs_of
from benchmarks.service.parts import own_server, percentile, wait_until, worker
from benchmarks.service.words import save_words
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.execution.threads import limit_spinning
from sluice.producer.client import Producer

NUM_WAKES = 200


def folder_with_tokenizer() -> Path:
    """Return the random model's folder with a tokenizer next to the weights: every token is a word."""
    folder = model_folder().with_name("sluice-benchmark-llama-125m-service")
    if not (folder / "tokenizer.json").is_file():
        shutil.copytree(model_folder(), folder, dirs_exist_ok=True)
        save_words(folder, VOCAB_SIZE)
    return folder


class BareEngine:
    """The engine without the service, in a separate process: runs all jobs once, when asked."""

    def __init__(self, num_seqs: int) -> None:
        command = [sys.executable, "-m", "benchmarks.service.run", "--only-engine", str(num_seqs)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "BareEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def run_s(self) -> float:
        """Return seconds for all jobs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def answer_as_engine(num_seqs: int) -> None:
    """Run all jobs for each input line, and print the seconds: started by `BareEngine`."""
    options = ModelOptions(
        path=folder_with_tokenizer(),
        device="cpu",
        max_num_seqs=num_seqs,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    runner, jobs = RecordingRunner(load_model_runner(options)), jobs_of(num_seqs)
    for _ in sys.stdin:
        began_s = time.perf_counter()
        run_ours(runner, jobs, num_seqs)
        print(time.perf_counter() - began_s, flush=True)


def pairs(num_seqs: int, num_rounds: int) -> list[tuple[float, float, Parts]]:
    """Return seconds of the bare engine and of the whole service for all jobs, alternating, and the latter's parts.

    Both warm, the other idle.
    """
    flags = ("--model", str(folder_with_tokenizer()), *batching(num_seqs))
    with (
        BareEngine(num_seqs) as engine,
        own_server() as folder,
        Producer() as producer,
        measured_worker(folder, *flags) as meter,
    ):
        jobs = jobs_of(num_seqs)
        rounds = [(engine.run_s(), *measured_run(producer, meter, jobs)) for _ in range(1 + num_rounds)]
    return rounds[1:]


def print_pairs(num_seqs: int, num_rounds: int) -> None:
    """Print the pairs of one case, the median of their ratios, and the service's parts."""
    num_tokens = sum(job.num_output_tokens for job in jobs_of(num_seqs))
    found = pairs(num_seqs, num_rounds)
    ratios = [bare / whole for bare, whole, _ in found]
    for (bare, whole, _), ratio in zip(found, ratios, strict=True):
        print(f"{num_seqs:9} {num_tokens / bare:13.1f} {num_tokens / whole:14.1f} {ratio:17.3f}", flush=True)
    print(f"{num_seqs:9} median of the ratios {statistics.median(ratios):.3f}, best {max(ratios):.3f}")
    print(f"processor time in ms per 1,000 output tokens:\n{header()}")
    print(f"{row(num_seqs, medians([parts for _, _, parts in found]))}\n", flush=True)


def wakes_ms() -> list[float]:
    """Return milliseconds from before submit to the first token, each time with an idle worker."""
    with own_server() as folder, Producer() as producer, worker("--model", "null", log=folder / "worker.log"):
        return [_first_token_ms(producer) for _ in range(NUM_WAKES)]


def _first_token_ms(producer: Producer) -> float:
    began_s = time.perf_counter()
    receipt = producer.submit("hello", max_tokens=1)
    next(iter(producer.stream(receipt)))
    took_ms = 1000 * (time.perf_counter() - began_s)
    producer.result(receipt)
    return took_ms


def first_token_s() -> tuple[float, float]:
    """Return seconds from a worker's start to the first token of a waiting job, and TTFT of 128 tokens when idle."""
    prompt = list(range(3, 131))
    with own_server() as folder, Producer() as producer:
        receipt = producer.submit(token_ids=prompt, max_tokens=4, ignore_eos=True)
        began_s = time.perf_counter()
        with worker("--model", str(folder_with_tokenizer()), log=folder / "worker.log"):
            next(iter(producer.stream(receipt)))
            start_s = time.perf_counter() - began_s
            ttfts = [_ttft_s(producer, [*prompt[:-1], 200 + i]) for i in range(10)]
    return start_s, statistics.median(ttfts)


def _ttft_s(producer: Producer, prompt: list[int]) -> float:
    began_s = time.perf_counter()
    receipt = producer.submit(token_ids=prompt, max_tokens=1, ignore_eos=True)
    next(iter(producer.stream(receipt)))
    took_s = time.perf_counter() - began_s
    wait_until(lambda: producer.status(receipt).state == "done", "the job's end", every_s=0.001)
    return took_s


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="runs of each, in turns (default 9)")
    parser.add_argument("--sequences", default="1,16,48", help="at once (default 1,16,48)")
    parser.add_argument("--only-ratios", action="store_true", help="measure neither wake-up nor start")
    parser.add_argument("--only-engine", type=int, metavar="SEQUENCES", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only_engine:
        answer_as_engine(given.only_engine)
        return
    # Both sides use the worker's wait policy; the processes started here inherit it.
    limit_spinning()
    print(f"{'sequences':>9} {'engine tok/s':>13} {'service tok/s':>14} {'service / engine':>17}")
    for num_seqs in map(int, given.sequences.split(",")):
        print_pairs(num_seqs, given.rounds)
    if given.only_ratios:
        return
    wakes = wakes_ms()
    print(f"submit to first token, null model: p50 {percentile(wakes, 50):.2f} ms, p99 {percentile(wakes, 99):.2f} ms")
    start_s, ttft_s = first_token_s()
    print(f"start of a worker process to first token, 125 M: {start_s:.2f} s")
    print(f"TTFT of 128 prompt tokens, 125 M, idle: {1000 * ttft_s:.0f} ms")


if __name__ == "__main__":
    main()
