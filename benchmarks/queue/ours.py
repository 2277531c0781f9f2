"""Our queue, measured like the peers: the same server, no-op jobs of the null model, real worker processes."""

import sqlite3
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.processes import Server, process_s, server, wait_until, worker
from sluice.producer.client import Producer

QUIET = ("--log-level", "warning")
NULL = ("--max-num-seqs", "256", "--max-num-batched-tokens", "131072", *QUIET)
PROMPT = "x" * 16
TOKENS = 200
STEP_MODEL = "null?step_s=0.01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """A drain that began with a full queue, ours or a peer's."""

    submitted_per_s: float
    done_per_s: float
    client_us_per_submit: float
    server_us_per_submit: float
    """Processor time of the submitter and of the server per submitted job."""

    commands_per_job: float
    """Commands that the server ran per drained job, including those inside scripts."""

    server_us_per_job: float
    worker_us_per_job: float
    """Processor time of the server and of all workers per drained job: nearly independent of other load."""

    recorded_per_s: float | None = None
    """Rows written to the history per second, from the same start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """Jobs that streamed at once."""

    tokens_per_s: float
    worker_us_per_token: float
    server_us_per_token: float


@contextmanager
def _recorder(here: Server) -> Generator[None]:
    """Run a recorder; it ends when its input does."""
    command = [sys.executable, "-P", "-m", "sluice.worker", "record", "--until-eof", *QUIET]
    with (here.folder / "recorder.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.communicate(timeout=60)


def submit(producer: Producer, num_jobs: int, *, tokens: int = 1, stream: bool = False) -> float:
    """Submit jobs; return seconds.

    Raises:
        RuntimeError: one was refused.
    """
    began_s = time.perf_counter()
    prompts = (PROMPT for _ in range(num_jobs))
    answers = producer.submit_many(prompts, max_tokens=tokens, ignore_eos=True, stream=stream)
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    if refused:
        raise RuntimeError(f"{len(refused)} jobs were refused: {refused[0]}")
    return time.perf_counter() - began_s


def _num_rows(here: Server) -> int:
    """Return the number of completed jobs in the history."""
    with sqlite3.connect(f"file:{here.folder / 'history.db'}?mode=ro", uri=True) as connection:
        return connection.execute("SELECT count(*) FROM jobs WHERE state = 'done'").fetchone()[0]


def drain(num_jobs: int, num_workers: int = 1, *, with_history: bool = False) -> Drained:
    """Submit to a paused queue, and resume it."""
    with server() as here, Producer() as producer, ExitStack() as stack:
        workers = [stack.enter_context(worker(here, *NULL, is_alone=True)) for _ in range(num_workers)]
        if with_history:
            stack.enter_context(_recorder(here))
        producer.pause()
        client_s, server_s = time.process_time(), here.cpu_s()
        submit_s = submit(producer, num_jobs)
        client_s, submit_server_s = time.process_time() - client_s, here.cpu_s() - server_s
        commands, server_s, worker_s = here.num_commands(), here.cpu_s(), sum(process_s(one.pid) for one in workers)
        began_s = time.perf_counter()
        producer.pause(is_paused=False)
        wait_until(lambda: here.count("done") == num_jobs, "all jobs to be done")
        drain_s = time.perf_counter() - began_s
        used_s, worker_s = here.cpu_s() - server_s, sum(process_s(one.pid) for one in workers) - worker_s
        commands = here.num_commands() - commands
        if with_history:
            wait_until(lambda: _num_rows(here) == num_jobs, "all jobs to be recorded")
        return Drained(
            submitted_per_s=num_jobs / submit_s,
            done_per_s=num_jobs / drain_s,
            client_us_per_submit=client_s / num_jobs * 1e6,
            server_us_per_submit=submit_server_s / num_jobs * 1e6,
            commands_per_job=commands / num_jobs,
            server_us_per_job=used_s / num_jobs * 1e6,
            worker_us_per_job=worker_s / num_jobs * 1e6,
            recorded_per_s=num_jobs / (time.perf_counter() - began_s) if with_history else None,
        )


def stream(num_jobs: int, interval_s: float, *, tokens: int = TOKENS, model: str = STEP_MODEL) -> Streamed:
    """Stream this many jobs at once, tokens every `interval_s` as if read."""
    rounds = ("--stream-interval", str(interval_s), "--unread-interval", "0")
    options = (*NULL, *rounds, "--max-num-seqs", str(num_jobs))
    with server() as here, Producer() as producer, worker(here, *options, model=model, is_alone=True) as process:
        submit(producer, 1, stream=True)
        wait_until(lambda: here.count("done") == 1, "the first job")
        worker_s, server_s, began_s = process_s(process.pid), here.cpu_s(), time.perf_counter()
        submit(producer, num_jobs, tokens=tokens, stream=True)
        wait_until(lambda: here.count("done") == 1 + num_jobs, "all jobs to be done")
        num_tokens, took_s = num_jobs * tokens, time.perf_counter() - began_s
        return Streamed(
            tokens_per_s=num_tokens / took_s,
            worker_us_per_token=(process_s(process.pid) - worker_s) / num_tokens * 1e6,
            server_us_per_token=(here.cpu_s() - server_s) / num_tokens * 1e6,
        )
