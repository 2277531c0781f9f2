"""Scripts of the queue on a server of their own, for the gate.

Scripts are called as by clients and workers, on a real server without other work. Processor time of the server's main
thread (`INFO cpu`) depends on other load only through caches and clock rates.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from sluice.protocol import calls
from sluice.protocol.limits import MAX_JOBS_PER_CALL
from tests.protocol.driving import Queue, Worker, new_job
from tests.servers import RedisServer, redis_server

NUM_LEASED = 32
EXPIRY_MS = 3_600_000


@dataclass(slots=True, eq=False)
class Bench:
    """A queue on a separate server. Mutable: it counts the jobs that it has created."""

    server: RedisServer
    queue: Queue
    num_jobs: int = 0

    def spent_us(self) -> float:
        """Return microseconds that the server's main thread has worked since its start."""
        usage = self.queue.client.info("cpu")
        return 1e6 * (usage["used_cpu_user_main_thread"] + usage["used_cpu_sys_main_thread"])

    def submit(self, count: int) -> None:
        """Submit jobs."""
        for begin in range(0, count, MAX_JOBS_PER_CALL):
            numbers = range(self.num_jobs, self.num_jobs + min(MAX_JOBS_PER_CALL, count - begin))
            self.num_jobs += len(numbers)
            answers = self.queue.submit(*(new_job(f"{n:08d}", "t0") for n in numbers))
            if not all(isinstance(answer, calls.Accepted) for answer in answers):
                raise RuntimeError(f"a job was not accepted: {answers[0]}")

    def pull(self, worker: Worker, count: int) -> list[calls.LeasedJob]:
        """Lease this many jobs."""
        jobs: list[calls.LeasedJob] = []
        while len(jobs) < count:
            taken = worker.pull(sequences=min(NUM_LEASED, count - len(jobs))).jobs
            if not taken:
                raise RuntimeError(f"the queue gave {len(jobs)} of {count} jobs")
            jobs += taken
        return jobs

    def worker(self) -> Worker:
        """Register a worker that lives for the whole run."""
        worker = self.queue.worker("w")
        worker.beat(expiry_ms=EXPIRY_MS)
        return worker


@contextmanager
def bench() -> Generator[Bench]:
    """Start a fresh server with an empty queue."""
    with redis_server() as server:
        queue = Queue(server.client())
        queue.configure(max_waiting_jobs=10_000_000, max_outbox_entries=10_000_000)
        yield Bench(server, queue)
