"""Cost of the service compared with the bare engine: throughput, wake-up, time to first token, start.

    python -m benchmarks service [--rounds 9] [--sequences 1,16,48] [--only-ratios]

The same requests as `benchmarks engine` (random `llama-100m`, bf16), by the bare engine in a separate process and
through the whole service (Redis with its append-only file, worker process, recorder into SQLite, tokens on channels),
alternating, each while the other is idle; every pair and the median of their ratios. Neither speculates: a random model
repeats itself, and drafts would hide the cost. Wake-up is measured with the null model: an idle worker, one job at a
time, from before `submit` until the reader has the first token.
"""

import argparse
import statistics
import time
from contextlib import ExitStack

from benchmarks.engine.bare import jobs_of, num_wanted
from benchmarks.engine.models import model_folder
from benchmarks.engine.peers import Case, open_bare, open_service
from benchmarks.processes import server, wait_until, worker
from benchmarks.tables import table
from sluice.engine.execution.threads import limit_spinning
from sluice.history.percentiles import percentile
from sluice.producer.client import Producer

NUM_WAKES = 200


def ratios_table(num_seqs: int, num_rounds: int) -> str:
    """Return the pairs of one case and the median of their ratios. Both are warm, the other idle."""
    with ExitStack() as stack:
        case = Case(model=model_folder(), weights="bf16", max_num_seqs=num_seqs, num_requests=len(jobs_of(num_seqs)))
        engine = open_bare(stack, case)
        service = open_service(stack, case)
        pairs = [(engine(), service()) for _ in range(1 + num_rounds)][1:]
    num_tokens, ratios = num_wanted(jobs_of(num_seqs)), [bare / whole for bare, whole in pairs]
    rows = [("sequences", "engine tok/s", "service tok/s", "service / engine")]
    for (bare, whole), ratio in zip(pairs, ratios, strict=True):
        rows.append((f"{num_seqs}", f"{num_tokens / bare:.1f}", f"{num_tokens / whole:.1f}", f"{ratio:.3f}"))
    return f"{table(rows)}\nmedian of the ratios {statistics.median(ratios):.3f}, best {max(ratios):.3f}\n"


def wakes_ms(num_wakes: int) -> list[float]:
    """Return milliseconds from before submit to the first token, each time with an idle worker, in order."""
    with server() as here, Producer() as producer, worker(here):
        return sorted(1000 * first_token_s(producer, list(b"hello")) for _ in range(num_wakes))


def first_token_s(producer: Producer, prompt: list[int]) -> float:
    """Return seconds from before submit until the reader has the first token; the job has ended then."""
    began_s = time.perf_counter()
    receipt = producer.submit(token_ids=prompt, max_tokens=1, ignore_eos=True)
    next(iter(producer.stream(receipt)))
    took_s = time.perf_counter() - began_s
    wait_until(lambda: producer.status(receipt).state == "done", "the job's end", every_s=0.001)
    return took_s


def start_s() -> tuple[float, float]:
    """Return seconds from a worker's start to the first token of a waiting job, and TTFT of 128 tokens when idle."""
    prompt = list(range(3, 131))
    with server() as here, Producer() as producer:
        receipt = producer.submit(token_ids=prompt, max_tokens=4, ignore_eos=True)
        began_s = time.perf_counter()
        with worker(here, model=str(model_folder())):
            next(iter(producer.stream(receipt)))
            took_s = time.perf_counter() - began_s
            ttfts = [first_token_s(producer, [*prompt[:-1], 200 + i]) for i in range(10)]
    return took_s, statistics.median(ttfts)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each, in turns (default 9)")
    parser.add_argument("--sequences", default="1,16,48", help="at once (default 1,16,48)")
    parser.add_argument("--only-ratios", action="store_true", help="measure neither wake-up nor start")
    given = parser.parse_args()
    # Both sides use the worker's wait policy; the processes started here inherit it.
    limit_spinning()
    for num_seqs in map(int, given.sequences.split(",")):
        print(ratios_table(num_seqs, given.rounds), flush=True)
    if given.only_ratios:
        return
    wakes = wakes_ms(NUM_WAKES)
    print(f"submit to first token, null model: p50 {percentile(wakes, 50):.2f} ms, p99 {percentile(wakes, 99):.2f} ms")
    took_s, ttft_s = start_s()
    print(f"start of a worker process to first token: {took_s:.2f} s")
    print(f"TTFT of 128 prompt tokens, idle: {1000 * ttft_s:.0f} ms")


if __name__ == "__main__":
    main()
