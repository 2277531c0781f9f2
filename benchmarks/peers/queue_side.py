"""Peer queues, each measured in the same way on a separate server.

A job appends its 16-byte name and the time to a file (`queues/ledger.py`), which records what ran, how often and when.
A ready worker is stopped while jobs are submitted, so a drain begins with a full queue and without start-up time.
"""

import os
import signal
import struct
import subprocess
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import HERE, Recipe, ask, python_of
from benchmarks.processes import Server, group_s, server
from benchmarks.queue.ours import Drained

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="taskiq", installs=(("taskiq==0.13.0", "taskiq-redis==1.2.4", "hiredis", "uvloop"),)),
        Recipe(name="dramatiq", installs=(("dramatiq[redis]==2.2.1", "hiredis"),)),
        Recipe(name="huey", installs=(("huey==3.5.4", "redis", "hiredis"),)),
    )
}
"""The three that drained fastest of eight (docs/lab/queue.md)."""

QUEUES = HERE / "queues"
RECORD = struct.Struct("<16sq")
NUM_WARM_UP = 20
SETTLE_S = 2.0
"""Wait after the first worker's warm-up, for a second one to become ready."""

START_S = 60.0
DRAIN_S = 300.0


@dataclass(frozen=True, slots=True)
class Bench:
    """A peer and its server. Its programs run in its own environment."""

    recipe: Recipe
    server: Server

    @property
    def ledger(self) -> Path:
        """The ledger of its jobs."""
        return self.server.folder / "ledger"

    @property
    def environ(self) -> Mapping[str, str]:
        """Environment variables of its programs."""
        return {"PEER_LEDGER": str(self.ledger), "PEER_REDIS_URL": self.server.url, "PYTHONPATH": str(QUEUES)}

    def enqueue(self, count: int, prefix: str) -> dict[str, float]:
        """Submit in bulk; return seconds, and those of processor time."""
        command = [python_of(self.recipe), "drive.py", self.recipe.name, "enqueue", str(count), prefix]
        return ask(command, self.environ, QUEUES)

    def ran(self, prefix: str) -> list[tuple[str, int]]:
        """Return (job, time in ns) of each execution of jobs whose names have this prefix."""
        raw = self.ledger.read_bytes() if self.ledger.exists() else b""
        whole = raw[: len(raw) - len(raw) % RECORD.size]
        found = ((name.decode(), at_ns) for name, at_ns in RECORD.iter_unpack(whole))
        return [one for one in found if one[0].startswith(prefix)]

    def wait_for(self, count: int, prefix: str, within_s: float) -> bool:
        """Wait until this many different jobs have run; return whether they did."""
        deadline_s = time.monotonic() + within_s
        while len({name for name, _ in self.ran(prefix)}) < count:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        return True

    @contextmanager
    def workers(self, count: int) -> Generator[list["subprocess.Popen[bytes]"]]:
        """Run this many worker processes, warmed up.

        Raises:
            RuntimeError: they run nothing.
        """
        with ExitStack() as stack:
            processes = [stack.enter_context(self._worker()) for _ in range(count)]
            self.enqueue(NUM_WARM_UP, "w")
            if not self.wait_for(NUM_WARM_UP, "w", START_S):
                log = (self.server.folder / "worker.log").read_text()[-3000:]
                raise RuntimeError(f"{self.recipe.name}'s worker did not start:\n{log}")
            time.sleep(SETTLE_S * count)
            yield processes

    @contextmanager
    def _worker(self) -> "Generator[subprocess.Popen[bytes]]":
        """Run one worker process with its children, in its own process group; killed at the end."""
        command = [python_of(self.recipe), "drive.py", self.recipe.name, "work"]
        environ = {**os.environ, **self.environ}
        with (self.server.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=QUEUES, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            yield process
        finally:
            _signal([process], signal.SIGKILL)
            process.wait()


def _signal(processes: list["subprocess.Popen[bytes]"], number: signal.Signals) -> None:
    for process in processes:
        # A group may be gone: a worker that ended early shows as jobs that did not run.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def drain(name: str, num_jobs: int, num_workers: int) -> Drained:
    """Submit to stopped workers, and resume them.

    Raises:
        RuntimeError: some jobs did not run.
    """
    with server() as here:
        bench = Bench(RECIPES[name], here)
        with bench.workers(num_workers) as processes:
            _signal(processes, signal.SIGSTOP)
            submit_cpu_s = here.cpu_s()
            enqueued = bench.enqueue(num_jobs, "d")
            commands, cpu_s, began_ns = here.num_commands(), here.cpu_s(), time.monotonic_ns()
            worker_s = sum(group_s(process.pid) for process in processes)
            _signal(processes, signal.SIGCONT)
            if not bench.wait_for(num_jobs, "d", DRAIN_S):
                raise RuntimeError(f"{name}: {len(bench.ran('d'))} of {num_jobs} jobs ran within {DRAIN_S:g} s")
            drain_s = (max(at_ns for _, at_ns in bench.ran("d")) - began_ns) / 1e9
            return Drained(
                submitted_per_s=num_jobs / enqueued["seconds"],
                done_per_s=num_jobs / drain_s,
                client_us_per_submit=enqueued["processor_s"] / num_jobs * 1e6,
                server_us_per_submit=(cpu_s - submit_cpu_s) / num_jobs * 1e6,
                commands_per_job=(here.num_commands() - commands) / num_jobs,
                server_us_per_job=(here.cpu_s() - cpu_s) / num_jobs * 1e6,
                worker_us_per_job=(sum(group_s(process.pid) for process in processes) - worker_s) / num_jobs * 1e6,
            )
