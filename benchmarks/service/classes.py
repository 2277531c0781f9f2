"""Interactive jobs beside a batch on one worker: time to the first token, and what the throughput loses.

    python -m benchmarks classes [--seconds 120] [--rate 0.8] [--dtype auto] [--model NAME] [--peers none|vllm]

One worker with 16 places runs the random 100 M model. A backlog of class 0 saturates it, older than nine steps of
ageing (0.1 s each here); interactive jobs of class 9 come at random times (Poisson, the same in each run). All jobs
have 256 random prompt tokens and 32 to 96 output tokens, so tokens per second compare. Runs, each with a fresh server:

- interactive jobs alone, for the time to the first token of an idle worker;
- the batch alone, for its throughput and its steps: the gaps between the tokens of one of its jobs;
- both under the policy `priority`; and under `fcfs`, for a fifth of the time.

With `--model null?step_s=…&token_s=…` the steps of the model are waits of that length: the rest of the service is
measured on a busy machine, too.

The time to the first token is from before `submit` until the reader has it. Throughput counts the tokens that are drawn
for both while interactive jobs come. With `--peers vllm`, vLLM's server for CPU does the first three with
`--scheduling-policy priority`; it has the backlog in its memory.
"""

import argparse
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from benchmarks.engine.models import model_folder
from benchmarks.gateway.parts import free_port
from benchmarks.peers.vllm_server import VllmServer, counter_of, vllm_server
from benchmarks.service.parts import own_server, percentile, wait_until, worker
from sluice.engine.execution.threads import limit_spinning
from sluice.producer.client import Producer
from sluice.producer.contract.calls import QueueSettings
from sluice.producer.contract.jobs import job as one_job

BATCHING = ("--max-num-seqs", "16", "--max-num-batched-tokens", "512")
PROMPT_TOKENS, OUTPUT_TOKENS = 256, (32, 96)
BACKLOG, INTERACTIVE = 2400, 9
AGE_STEP_MS = 100
WARM_S = 5.0
"""The batch runs for so long before interactive jobs come and tokens are counted."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One job."""

    prompt: list[int]
    num_output_tokens: int


class Target(Protocol):
    """A server that generates."""

    def generate(self, ask: Ask, on_token: Callable[[], None]) -> None:
        """Generate an interactive job to its end."""

    def submit_batch(self, asks: Sequence[Ask], on_token: Callable[[], None]) -> None:
        """Let these generate in the lowest class, and read the first one."""

    def num_tokens(self) -> float:
        """Return the output tokens drawn so far."""
        ...


@dataclass(frozen=True, slots=True)
class Ours:
    """The whole service with one worker."""

    producer: Producer
    metrics_port: int

    def generate(self, ask: Ask, on_token: Callable[[], None]) -> None:
        """See `Target`."""
        options: Mapping[str, Any] = {"ignore_eos": True, "temperature": 0, "priority": INTERACTIVE}
        receipt = self.producer.submit(token_ids=ask.prompt, max_tokens=ask.num_output_tokens, **options)
        for _ in self.producer.stream(receipt):
            on_token()

    def submit_batch(self, asks: Sequence[Ask], on_token: Callable[[], None]) -> None:
        """See `Target`."""
        jobs = [one_job(one.prompt, max_tokens=one.num_output_tokens, ignore_eos=True, temperature=0) for one in asks]
        first, *_ = list(self.producer.submit_many(jobs))
        for _ in self.producer.stream(str(first)):
            on_token()

    def num_tokens(self) -> float:
        """See `Target`."""
        return counter_of(self.metrics_port, "sluice_output_tokens_total")


@contextmanager
def ours(model: str, dtype: str, policy: str) -> Generator[Target]:
    """Run a server and a worker."""
    port = free_port()
    options = ("--dtype", dtype, "--policy", policy, "--metrics-port", str(port), "--drain", "hand-over", *BATCHING)
    with (
        own_server() as folder,
        Producer() as producer,
        worker("--model", model, *options, log=folder / "worker.log"),
    ):
        producer.configure(QueueSettings(age_step_ms=AGE_STEP_MS))
        yield Ours(producer, port)


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM's server; its lower priorities go first."""

    server: VllmServer

    def generate(self, ask: Ask, on_token: Callable[[], None]) -> None:
        """See `Target`."""
        self._complete(on_token, prompt=ask.prompt, max_tokens=ask.num_output_tokens, priority=0)

    def submit_batch(self, asks: Sequence[Ask], on_token: Callable[[], None]) -> None:
        """See `Target`. One request has one length, so there is one for each length."""
        for length in {one.num_output_tokens for one in asks}:
            body = {"prompt": [one.prompt for one in asks if one.num_output_tokens == length], "max_tokens": length}
            threading.Thread(
                target=self._complete, args=(lambda: None,), kwargs=body | {"priority": 9}, daemon=True
            ).start()
        on_token()

    def num_tokens(self) -> float:
        """See `Target`."""
        return counter_of(self.server.port, "vllm:generation_tokens_total")

    def _complete(self, on_token: Callable[[], None], **options: object) -> None:
        body = {"model": self.server.model, "stream": True, "ignore_eos": True, "temperature": 0} | options
        request = urllib.request.Request(
            f"{self.server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3600) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    on_token()


@contextmanager
def vllm(dtype: str) -> Generator[Target]:
    """Run vLLM's server."""
    with vllm_server(model_folder("llama-100m"), "--dtype", dtype, "--scheduling-policy", "priority", *BATCHING) as one:
        yield Vllm(one)


class Clock:
    """Times of the tokens of one job. Mutable."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self.times_ms: list[float] = []

    def __call__(self) -> None:
        """Note a token."""
        self.times_ms.append(1000 * (time.perf_counter() - self._began_s))

    @property
    def gaps_ms(self) -> list[float]:
        """Between one token and the next."""
        return [later - sooner for sooner, later in zip(self.times_ms, self.times_ms[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run measured."""

    tokens_per_s: float = 0.0
    ttft_ms: Sequence[float] = ()
    gaps_ms: Sequence[float] = ()


def make_asks(num_asks: int, seed: int) -> list[Ask]:
    """Return random jobs."""
    random = Random(seed)
    return [
        Ask([random.randrange(3, 256) for _ in range(PROMPT_TOKENS)], random.randint(*OUTPUT_TOKENS))
        for _ in range(num_asks)
    ]


def interact(target: Target, seconds: float, rate: float) -> list[float]:
    """Send interactive jobs at random times for so long; return milliseconds to each first token."""
    random, due_s, began_s = Random(7), 0.0, time.perf_counter()
    clocks, threads = list[Clock](), list[threading.Thread]()
    for ask in make_asks(int(2 * seconds * rate) + 10, seed=1):
        due_s += random.expovariate(rate)
        if due_s > seconds:
            break
        time.sleep(max(0.0, began_s + due_s - time.perf_counter()))
        clocks.append(Clock())
        threads.append(threading.Thread(target=target.generate, args=(ask, clocks[-1]), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return [clock.times_ms[0] for clock in clocks]


def run_alone(opened: AbstractContextManager[Target], seconds: float, rate: float) -> Outcome:
    """Measure interactive jobs on an idle worker."""
    with opened as target:
        target.generate(make_asks(1, seed=3)[0], Clock())
        return Outcome(ttft_ms=interact(target, seconds, rate))


def run_batch(opened: AbstractContextManager[Target], seconds: float, rate: float = 0.0) -> Outcome:
    """Measure the batch, with interactive jobs unless `rate` is 0.

    Raises:
        RuntimeError: the batch may have ended before the run.
    """
    asks = make_asks(BACKLOG, seed=2)
    with opened as target:
        clock = Clock()
        threading.Thread(target=target.submit_batch, args=(asks, clock), daemon=True).start()
        wait_until(lambda: target.num_tokens() > 0, "the batch to run", every_s=0.1)
        time.sleep(WARM_S)
        began_s, before = time.perf_counter(), target.num_tokens()
        ttft_ms: list[float] = []
        if rate:
            ttft_ms = interact(target, seconds, rate)
        else:
            time.sleep(seconds)
        num_tokens = target.num_tokens()
        tokens_per_s = (num_tokens - before) / (time.perf_counter() - began_s)
        if num_tokens >= sum(one.num_output_tokens for one in asks):
            raise RuntimeError(f"the batch of {BACKLOG} jobs is too small for {seconds:g} s: choose fewer --seconds")
        return Outcome(tokens_per_s=tokens_per_s, ttft_ms=ttft_ms, gaps_ms=clock.gaps_ms)


def row(name: str, outcome: Outcome, batch: Outcome | None = None) -> None:
    """Print one line."""
    ttft = outcome.ttft_ms
    times = [f"{percentile(ttft, p):.0f}" for p in (50, 99)] if ttft else ["", ""]
    share = f"{outcome.tokens_per_s / batch.tokens_per_s:.3f}" if batch else ""
    rate = f"{outcome.tokens_per_s:.1f}" if outcome.tokens_per_s else ""
    print(f"{name:32} {len(ttft):4} {times[0]:>8} {times[1]:>8} {rate:>9} {share:>8}", flush=True)


def compare(name: str, start: Callable[[], AbstractContextManager[Target]], seconds: float, rate: float) -> Outcome:
    """Print three runs of a server; return the one of the batch alone."""
    alone = run_alone(start(), seconds, rate)
    row(f"{name}, interactive alone", alone)
    batch = run_batch(start(), seconds / 2)
    row(f"{name}, batch alone", batch)
    both = run_batch(start(), seconds, rate)
    row(f"{name}, both, priority", both, batch)
    if batch.gaps_ms:
        step_ms = percentile(batch.gaps_ms, 99)
        limit_ms = 1.3 * percentile(alone.ttft_ms, 99) + step_ms
        print(f"step of the batch: p50 {percentile(batch.gaps_ms, 50):.0f} ms, p99 {step_ms:.0f} ms")
        print(f"limit of the p99: 1.3 x {percentile(alone.ttft_ms, 99):.0f} + {step_ms:.0f} = {limit_ms:.0f} ms")
    return batch


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="length of a run (default 120)")
    parser.add_argument("--rate", type=float, default=0.8, help="interactive jobs a second (default 0.8)")
    parser.add_argument("--dtype", default="auto", help="of the weights: auto (bf16) or float32 (default auto)")
    parser.add_argument("--model", help="another model, such as null?step_s=0.09&token_s=0.00115")
    parser.add_argument("--peers", choices=("none", "vllm"), default="none", help="also measure vLLM's server")
    given = parser.parse_args()
    limit_spinning()
    print(f"{'run':32} {'jobs':>4} {'p50 ms':>8} {'p99 ms':>8} {'tokens/s':>9} {'/ batch':>8}")
    if given.peers == "vllm":
        compare("vLLM", lambda: vllm(given.dtype), given.seconds, given.rate)
        return
    model = given.model or str(model_folder("llama-100m"))
    batch = compare("service", lambda: ours(model, given.dtype, "priority"), given.seconds, given.rate)
    row("service, both, fcfs", run_batch(ours(model, given.dtype, "fcfs"), given.seconds / 5, given.rate), batch)


if __name__ == "__main__":
    main()
