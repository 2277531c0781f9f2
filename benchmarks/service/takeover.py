"""Takeover time: from a worker's death to the lease of its jobs by another.

    python -m benchmarks takeover [--kills 30]

Three workers with the null model share jobs that outlast the run; the one with most of them is killed by SIGKILL at a
random moment between two of its heartbeats, and is restarted. Its parent process reports the death. Heartbeat and
lifetime are the defaults, 1 s and 4 s: without the report, it would take 3 to 4 s. There is no other load.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from benchmarks.service.parts import own_server, percentile, wait_until
from sluice.producer.client import Producer
from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.transport import embedded

NUM_WORKERS, NUM_JOBS = 3, 24
OUTPUT_TOKENS = 7000
COMMAND = (
    *(sys.executable, "-P", "-m", "sluice.worker", "start", "--cpu", "--metrics-port", "0", "--no-recorder"),
    *("--drain", "hand-over"),
    *("--model", "null?step_s=0.05&num_blocks=16384", "--log-level", "warning"),
)
BETWEEN_S = 1.0
"""A kill comes at any moment between two heartbeats."""

KEYS = QueueKeys("default")


@dataclass(slots=True)
class Fleet:
    """Worker processes. Mutable: they are killed and started."""

    client: Any  # redis-py's replies are untyped
    log: Path
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list["subprocess.Popen[bytes]"])

    def start(self) -> None:
        """Start one more."""
        with self.log.open("ab") as file:
            self.processes.append(subprocess.Popen(COMMAND, stdout=file, stderr=file))

    def busiest(self) -> tuple[str, int]:
        """Return (incarnation, pid) of the worker that holds most jobs."""
        found = [one.decode() for one in self.client.zrangebyscore(KEYS.key("alive"), time.time() * 1000, "+inf")]
        most = max(found, key=lambda one: self.client.hlen(KEYS.key("held", one)))
        return most, int(self.client.hget(KEYS.key("worker", most), "pid"))

    def kill(self) -> list[float]:
        """Kill the busiest; return seconds until another had each of its jobs."""
        incarnation, pid = self.busiest()
        held = [one.decode() for one in self.client.hkeys(KEYS.key("held", incarnation))]
        died_ms = time.time() * 1000
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.client.exists(KEYS.key("held", incarnation)), "its jobs to be taken over")
        return [(self.started_ms(one) - died_ms) / 1000 for one in held]

    def started_ms(self, job_id: str) -> int:
        """Return when a job's present lease began, by the server's clock, which is this machine's."""
        _, tenant, name = job_id.split(".")
        return int(self.client.hget(KEYS.key("job", tenant, name), "started"))

    def stop(self) -> None:
        """End all workers, also those that still start."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(timeout=60)


def measure(num_kills: int) -> tuple[list[float], list[float]]:
    """Return seconds from death to lease: of each job, and of the last job of each death."""
    dice, of_jobs, of_deaths = random.Random(), list[float](), list[float]()
    with own_server() as folder, Producer() as producer:
        client = redis.Redis(unix_socket_path=str(embedded.ensure(folder).socket_path))
        fleet = Fleet(client, folder / "workers.log")
        for _ in range(NUM_WORKERS):
            fleet.start()
        wait_until(lambda: len(producer.queue()[0].workers) == NUM_WORKERS, "all workers to start")
        list(producer.submit_many(("x" * 16 for _ in range(NUM_JOBS)), max_tokens=OUTPUT_TOKENS))
        # A new worker takes nothing over for one lifetime: it cannot know whether others could send heartbeats.
        time.sleep(5)
        try:
            for _ in range(num_kills):
                wait_until(lambda: len(producer.queue()[0].workers) >= NUM_WORKERS, "all workers to be back")
                time.sleep(dice.uniform(0, BETWEEN_S))
                took_s = fleet.kill()
                of_jobs += took_s
                of_deaths.append(max(took_s))
                fleet.start()
        finally:
            fleet.stop()
    return of_jobs, of_deaths


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30, help="how often a worker is killed (default 30)")
    of_jobs, of_deaths = measure(parser.parse_args().kills)
    print(f"{'death to leased by another':28} {'n':>5} {'p50 s':>7} {'p99 s':>7} {'max s':>7}")
    for name, values in (("each job", of_jobs), ("last job of each death", of_deaths)):
        p50, p99 = percentile(values, 50), percentile(values, 99)
        print(f"{name:28} {len(values):5} {p50:7.2f} {p99:7.2f} {max(values):7.2f}")


if __name__ == "__main__":
    main()
