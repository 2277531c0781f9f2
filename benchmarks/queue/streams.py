"""Streaming: cost per token, token latency, and the effect of a slower network.

Jobs of 200 tokens of the null model, all running at once, 10 ms per step; processor time of the worker and of the
server per token, from /proc and INFO, without other work.
"""

import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.queue.ours import PROBED, PROMPT, num_done_cheaply, ours_on, read_ledger, worker
from benchmarks.queue.plain_server import PlainServer, plain_server
from benchmarks.queue.probed_worker import SENT
from benchmarks.queue.processor_time import process_s
from benchmarks.service.parts import wait_until
from sluice.producer.client import Producer

TOKENS = 200
STEP_MODEL = "null?step_s=0.01"
EACH_WAY_S = 0.0005
"""Half of the added round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """Jobs that streamed at once."""

    tokens_per_s: float
    worker_us_per_token: float
    server_us_per_token: float


def stream(
    num_jobs: int, interval_s: float, *, tokens: int = TOKENS, delay_s: float = 0.0, model: str = STEP_MODEL
) -> Streamed:
    """Stream so many jobs at once, tokens every `interval_s` as if read, over a link that adds `delay_s` each way."""
    rounds = ("--stream-interval", str(interval_s), "--unread-interval", "0")
    options = (*rounds, "--max-num-seqs", str(num_jobs))
    with (
        plain_server() as server,
        link(server, delay_s) as url,
        ours_on(server, url) as producer,
        worker(server, *options, model=model) as process,
    ):
        submit_streams(producer, 1, 1)
        wait_until(lambda: num_done_cheaply(server) == 1, "the first job")
        worker_s, server_s, began_s = process_s(process.pid), server.cpu_s(), time.perf_counter()
        submit_streams(producer, num_jobs, tokens)
        wait_until(lambda: num_done_cheaply(server) == 1 + num_jobs, "all jobs to be done")
        num_tokens, took_s = num_jobs * tokens, time.perf_counter() - began_s
        return Streamed(
            tokens_per_s=num_tokens / took_s,
            worker_us_per_token=(process_s(process.pid) - worker_s) / num_tokens * 1e6,
            server_us_per_token=(server.cpu_s() - server_s) / num_tokens * 1e6,
        )


def submit_streams(producer: Producer, num_jobs: int, tokens: int) -> None:
    """Submit streaming jobs."""
    for answer in producer.submit_many((PROMPT for _ in range(num_jobs)), max_tokens=tokens, ignore_eos=True):
        if isinstance(answer, Exception):
            raise answer


@contextmanager
def link(server: PlainServer, delay_s: float) -> Generator[str]:
    """Return the URL of a server, or of a slow link that leads to it."""
    if not delay_s:
        yield server.url
        return
    listen, target = server.folder / "slow.sock", server.folder / "redis.sock"
    command = [sys.executable, "-m", "benchmarks.queue.slow_link", str(listen), str(target), str(delay_s)]
    process = subprocess.Popen(command)
    try:
        wait_until(listen.exists, "the link", process)
        yield f"unix://{listen}"
    finally:
        process.kill()
        process.wait()


def underway_ms(num_tokens: int) -> list[float]:
    """Return milliseconds from sending a step's tokens to the server to a reader's receipt; one job, 20 ms per step."""
    with plain_server() as server, ours_on(server) as producer:
        with worker(server, model="null?step_s=0.02", module=PROBED):
            receipt = producer.submit(PROMPT, max_tokens=num_tokens, ignore_eos=True)
            read_ns = [time.monotonic_ns() for event in producer.stream(receipt) if event.token_ids]
        sent_ns = [at_ns for name, at_ns in read_ledger(server) if name == SENT]
    return [(at_ns - max(one for one in sent_ns if one < at_ns)) / 1e6 for at_ns in read_ns]
