"""Peer queues, each measured in the same way on a separate server.

A job appends its 16-byte name and the time to a file (`queues/ledger.py`), which records what ran, how often and when.
A ready worker is stopped while jobs are submitted, so a drain begins with a full queue and without start-up time.
"""

import os
import signal
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import HERE, Recipe, ask, python_of
from benchmarks.queue.figures import Drained, Killed
from benchmarks.queue.plain_server import PlainServer, plain_server
from benchmarks.queue.processor_time import group_s
from benchmarks.service.parts import wait_until

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="rq", installs=(("rq==2.12.0", "redis==8.1.0", "hiredis==3.5.0"),)),
        Recipe(name="arq", installs=(("arq==0.28.0", "hiredis", "uvloop"),)),
        Recipe(name="saq", installs=(("saq[hiredis]==0.26.4", "typing_extensions", "uvloop"),)),
        Recipe(name="taskiq", installs=(("taskiq==0.13.0", "taskiq-redis==1.2.4", "hiredis", "uvloop"),)),
        Recipe(name="streaq", installs=(("streaq==7.2.0", "uvloop"),)),
        Recipe(name="dramatiq", installs=(("dramatiq[redis]==2.2.1", "hiredis"),)),
        Recipe(name="celery", installs=(("celery[redis]==5.7.0", "hiredis"),)),
        Recipe(name="huey", installs=(("huey==3.5.4", "redis", "hiredis"),)),
    )
}

QUEUES = HERE / "queues"
RECORD = struct.Struct("<16sq")
NUM_WARM_UP = 20
SETTLE_S = 2.0
"""Wait after the first worker's warm-up, for a second one to become ready."""

START_S = 60.0


@dataclass(frozen=True, slots=True)
class Bench:
    """A peer and its server. Its programs run in its own environment."""

    recipe: Recipe
    server: PlainServer

    @property
    def ledger(self) -> Path:
        """The ledger of its jobs."""
        return self.server.folder / "ledger"

    @property
    def environ(self) -> Mapping[str, str]:
        """Environment variables of its programs."""
        return {"PEER_LEDGER": str(self.ledger), "PEER_REDIS_URL": self.server.url, "PYTHONPATH": str(QUEUES)}

    def ask(self, task: str, count: int, prefix: str) -> dict[str, Any]:
        """Run a command of `queues/drive.py`."""
        command = [python_of(self.recipe), "drive.py", self.recipe.name, task, str(count), prefix]
        return ask(command, self.environ, QUEUES)

    def enqueue_s(self, count: int, prefix: str) -> float:
        """Submit in bulk; return seconds."""
        return self.ask("enqueue", count, prefix)["seconds"]

    def ran(self, prefix: str) -> list[tuple[str, int]]:
        """Return (job, time in ns) of each execution of jobs whose names have this prefix."""
        raw = self.ledger.read_bytes() if self.ledger.exists() else b""
        whole = raw[: len(raw) - len(raw) % RECORD.size]
        found = ((name.decode(), at_ns) for name, at_ns in RECORD.iter_unpack(whole))
        return [one for one in found if one[0].startswith(prefix)]

    def wait_for(self, count: int, prefix: str, within_s: float) -> bool:
        """Wait until so many different jobs have run; return whether they did."""
        deadline_s = time.monotonic() + within_s
        while len({name for name, _ in self.ran(prefix)}) < count:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        return True

    @contextmanager
    def workers(self, count: int) -> Generator[list["subprocess.Popen[bytes]"]]:
        """Run so many worker processes, warmed up."""
        with ExitStack() as stack:
            processes = [stack.enter_context(self.worker()) for _ in range(count)]
            self._warm_up(count)
            yield processes

    @contextmanager
    def worker(self) -> "Generator[subprocess.Popen[bytes]]":
        """Run one worker process with its children, in its own process group; killed at the end."""
        command = [python_of(self.recipe), "drive.py", self.recipe.name, "work"]
        environ = {**os.environ, **self.environ}
        with (self.server.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=QUEUES, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            yield process
        finally:
            _signal(process, signal.SIGKILL)
            process.wait()

    def _warm_up(self, num_workers: int) -> None:
        self.enqueue_s(NUM_WARM_UP, "w")
        if not self.wait_for(NUM_WARM_UP, "w", START_S):
            log = (self.server.folder / "worker.log").read_text()[-3000:]
            raise RuntimeError(f"{self.recipe.name}'s worker did not start:\n{log}")
        time.sleep(SETTLE_S * num_workers)


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    # A group may be gone: a worker that ended early shows as jobs that did not run.
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def drain(name: str, num_jobs: int, num_workers: int) -> Drained:
    """Submit to stopped workers, and resume them."""
    with plain_server() as server:
        bench = Bench(RECIPES[name], server)
        with bench.workers(num_workers) as processes:
            for process in processes:
                _signal(process, signal.SIGSTOP)
            submit_cpu_s = server.cpu_s()
            enqueued = bench.ask("enqueue", num_jobs, "d")
            commands, cpu_s, began_ns = server.num_commands(), server.cpu_s(), time.monotonic_ns()
            worker_s = sum(group_s(process.pid) for process in processes)
            for process in processes:
                _signal(process, signal.SIGCONT)
            if not bench.wait_for(num_jobs, "d", 300):
                raise RuntimeError(f"{name}: {len(bench.ran('d'))} of {num_jobs} jobs ran within 300 s")
            drain_s = (max(at_ns for _, at_ns in bench.ran("d")) - began_ns) / 1e9
            return Drained(
                submitted_per_s=num_jobs / enqueued["seconds"],
                done_per_s=num_jobs / drain_s,
                client_us_per_submit=enqueued["processor_s"] / num_jobs * 1e6,
                server_us_per_submit=(cpu_s - submit_cpu_s) / num_jobs * 1e6,
                commands_per_job=(server.num_commands() - commands) / num_jobs,
                server_us_per_job=(server.cpu_s() - cpu_s) / num_jobs * 1e6,
                worker_us_per_job=(sum(group_s(process.pid) for process in processes) - worker_s) / num_jobs * 1e6,
            )


def wakes_ms(name: str, count: int) -> list[float]:
    """Return milliseconds from before the submit to the job's first line, one job at a time."""
    with plain_server() as server:
        bench = Bench(RECIPES[name], server)
        with bench.workers(1):
            submitted_ns: dict[str, int] = bench.ask("wake", count, "i")["submitted_ns"]
            ran = dict(bench.ran("i"))
            return [(ran[job] - at_ns) / 1e6 for job, at_ns in submitted_ns.items()]


def kill(name: str, num_jobs: int, within_s: float) -> Killed:
    """SIGKILL the worker when a third of the jobs has run, start another, and count."""
    with plain_server() as server:
        bench = Bench(RECIPES[name], server)
        with bench.workers(1) as [victim]:
            _signal(victim, signal.SIGSTOP)
            bench.enqueue_s(num_jobs, "k")
            _signal(victim, signal.SIGCONT)
            wait_until(lambda: len(bench.ran("k")) >= num_jobs // 3, "a third of the jobs to run", every_s=0.002)
            _signal(victim, signal.SIGKILL)
        with bench.worker():
            began_s = time.monotonic()
            bench.wait_for(num_jobs, "k", within_s)
            took_s = time.monotonic() - began_s
        times = Counter(job for job, _ in bench.ran("k"))
        return Killed(missing=num_jobs - len(times), twice=sum(n > 1 for n in times.values()), took_s=took_s)
