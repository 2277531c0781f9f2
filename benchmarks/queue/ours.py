"""Our queue, measured like the peers: the same server, no-op jobs of the null model, real worker processes."""

import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from random import Random

from benchmarks.queue.figures import Drained, Killed
from benchmarks.queue.plain_server import PlainServer, plain_server
from benchmarks.queue.probed_worker import SENT, name_of
from benchmarks.queue.processor_time import process_s
from benchmarks.service.parts import num_done, wait_until
from sluice.producer.client import Producer
from sluice.producer.contract.keys import QueueKeys

NULL = ("--cpu", "--metrics-port", "0", "--max-num-seqs", "256", "--max-num-batched-tokens", "131072")
QUIET = ("--log-level", "warning")
RECORD = struct.Struct("<16sq")
PROMPT = "x" * 16
PROBED = "benchmarks.queue.probed_worker"
ENTRIES = 2
"""On the channel of a job of one token: the token, and the end."""


@contextmanager
def ours_on(server: PlainServer, url: str | None = None) -> Generator[Producer]:
    """Make everything started inside use this server, or another URL that leads to it, and a history next to it."""
    own = {
        "SLUICE_REDIS_URL": url or server.url,
        "SLUICE_DATABASE_URL": f"sqlite:///{server.folder / 'history.db'}",
        "PEER_LEDGER": str(server.folder / "ledger"),
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        with Producer() as producer:
            yield producer
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def worker(
    server: PlainServer, *options: str, model: str = "null", module: str = "sluice.worker"
) -> Generator["subprocess.Popen[bytes]"]:
    """Run a worker process without a parent that is ready to pull; drained at the end, if it is still alive."""
    command = [sys.executable, "-m", module, "start", "--until-eof", "--model", model, *NULL, *QUIET, *options]
    with Producer() as producer, (server.folder / "worker.log").open("ab") as log:
        before = len(producer.queue()[0].workers)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            wait_until(lambda: len(producer.queue()[0].workers) > before, "the worker to start", process)
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


@contextmanager
def recorder(server: PlainServer) -> Generator[None]:
    """Run a recorder; it ends when its input does."""
    command = [sys.executable, "-m", "sluice.worker", "record", "--until-eof", *QUIET]
    with (server.folder / "recorder.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.communicate(timeout=60)


def submit(producer: Producer, num_jobs: int, prompt: str = PROMPT) -> float:
    """Submit jobs of one token; return seconds.

    Raises:
        RuntimeError: one was refused.
    """
    began_s = time.perf_counter()
    answers = producer.submit_many((prompt for _ in range(num_jobs)), max_tokens=1, stream=False)
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    if refused:
        raise RuntimeError(f"{len(refused)} jobs were refused: {refused[0]}")
    return time.perf_counter() - began_s


def num_rows(server: PlainServer) -> int:
    """Return the number of completed jobs in the history."""
    with sqlite3.connect(f"file:{server.folder / 'history.db'}?mode=ro", uri=True) as connection:
        return connection.execute("SELECT count(*) FROM jobs WHERE state = 'done'").fetchone()[0]


def num_done_cheaply(server: PlainServer) -> int:
    """Return the number of completed jobs, with one command: polling must not distort the measurement."""
    return int(server.client.hget(QueueKeys("default").key("counters"), "done") or 0)


def drain(num_jobs: int, num_workers: int = 1, *, prompt: str = PROMPT, with_history: bool = False) -> Drained:
    """Submit to a paused queue, and resume it."""
    with plain_server() as server, ours_on(server) as producer, ExitStack() as stack:
        workers = [stack.enter_context(worker(server)) for _ in range(num_workers)]
        if with_history:
            stack.enter_context(recorder(server))
        producer.pause()
        client_s, server_s = time.process_time(), server.cpu_s()
        submit_s = submit(producer, num_jobs, prompt)
        client_s, submit_server_s = time.process_time() - client_s, server.cpu_s() - server_s
        commands, server_s, worker_s = server.num_commands(), server.cpu_s(), sum(process_s(one.pid) for one in workers)
        began_s = time.perf_counter()
        producer.pause(is_paused=False)
        wait_until(lambda: num_done_cheaply(server) == num_jobs, "all jobs to be done")
        drain_s = time.perf_counter() - began_s
        used_s, worker_s = server.cpu_s() - server_s, sum(process_s(one.pid) for one in workers) - worker_s
        commands = server.num_commands() - commands
        if with_history:
            wait_until(lambda: num_rows(server) == num_jobs, "all jobs to be recorded")
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


def read_ledger(server: PlainServer) -> list[tuple[str, int]]:
    """Return (name, time in ns) of everything that a probed worker recorded."""
    return [(name.decode(), at_ns) for name, at_ns in RECORD.iter_unpack((server.folder / "ledger").read_bytes())]


def wakes_ms(count: int) -> list[float]:
    """Return milliseconds from before the submit to the job's first step, one job at a time."""
    random, submitted_ns = Random(0), dict[str, int]()
    with plain_server() as server, ours_on(server) as producer, worker(server, module=PROBED):
        for _ in range(count):
            began_ns = time.monotonic_ns()
            receipt = producer.submit(PROMPT, max_tokens=1)
            submitted_ns[name_of(receipt.id)] = began_ns
            producer.result(receipt)
            time.sleep(random.uniform(0.005, 0.02))
        first_ns = {name: at_ns for name, at_ns in reversed(read_ledger(server)) if name != SENT}
        return [(first_ns[name] - at_ns) / 1e6 for name, at_ns in submitted_ns.items()]


def kill(num_jobs: int, within_s: float) -> Killed:
    """SIGKILL the worker when a third of the jobs is done, start another, and count."""
    with plain_server() as server, ours_on(server) as producer:
        with worker(server) as victim:
            producer.pause()
            answers = producer.submit_many((PROMPT for _ in range(num_jobs)), max_tokens=1)
            ids = [str(answer) for answer in answers]
            producer.pause(is_paused=False)
            wait_until(lambda: num_done_cheaply(server) >= num_jobs // 3, "a third", every_s=0.002)
            victim.kill()
            victim.wait()
        began_s = time.monotonic()
        with worker(server):
            deadline_s = began_s + within_s
            wait_until(lambda: num_done(producer) >= num_jobs or time.monotonic() > deadline_s, "the rest")
            took_s = time.monotonic() - began_s
            views = [view for view in producer.views(ids) if view is not None]
        return Killed(
            missing=num_jobs - sum(view.state == "done" for view in views),
            # One token each: more on a channel, or a second end in the totals, would be a job done twice.
            twice=sum(_num_entries(server, one) > ENTRIES for one in ids) + max(0, num_done_cheaply(server) - num_jobs),
            took_s=took_s,
            started_again=sum(view.attempt > 1 for view in views),
        )


def _num_entries(server: PlainServer, job_id: str) -> int:
    _, tenant, random = job_id.split(".")
    return server.client.xlen(QueueKeys("default").key("channel", tenant, random, 0))
