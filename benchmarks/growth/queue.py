"""Growth curves of the queue: the server's processor time for each script.

Scripts are called as by clients and workers, on a real server without other work. Processor time of the server's main
thread (`INFO cpu`) depends on other load only through caches and clock rates.
"""

import asyncio
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.growth.curves import Curve
from sluice.producer.aio import AsyncProducer
from sluice.producer.contract import calls
from sluice.producer.contract.limits import MAX_JOBS_PER_CALL
from sluice.producer.contract.wire import JobId
from tests.contract.driving import Queue, Worker, ending, new_job, tokens
from tests.servers import RedisServer, redis_server

NUM_MEASURED = 1024
NUM_LEASED = 32
NUM_ROUNDS = 64
NUM_CALLS = 256
NUM_SPEAKING, NUM_TOKENS_SPOKEN, SPEAK_EVERY_S = 64, 100, 0.05
EXPIRY_MS = 3_600_000
LOOK_WITHIN_S = 120.0

Point = tuple[int, float]


@dataclass(slots=True, eq=False)
class Bench:
    """A queue on a separate server. Mutable: it counts the jobs that it has created."""

    server: RedisServer
    queue: Queue
    num_jobs: int = 0

    @contextmanager
    def counted(self, points: list[Point], size: int, per: int) -> Generator[None]:
        """Add a point: the main thread's work within the context, in microseconds, divided by `per`."""
        before_us = self.spent_us()
        yield
        points.append((size, (self.spent_us() - before_us) / per))

    def spent_us(self) -> float:
        """Return microseconds that the server's main thread has worked since its start."""
        found = self.queue.client.info("cpu")
        return 1e6 * (found["used_cpu_user_main_thread"] + found["used_cpu_sys_main_thread"])

    def num_scripts(self) -> int:
        """Return the number of scripts that the server has run."""
        return int(self.queue.client.info("commandstats")["cmdstat_evalsha"]["calls"])

    def used_bytes(self) -> int:
        """Return the memory of the server's data."""
        return int(self.queue.client.info("memory")["used_memory"])

    def submit(self, count: int, num_tenants: int = 1) -> None:
        """Submit jobs, the tenants in turn."""
        for begin in range(0, count, MAX_JOBS_PER_CALL):
            numbers = range(self.num_jobs, self.num_jobs + min(MAX_JOBS_PER_CALL, count - begin))
            self.num_jobs += len(numbers)
            answers = self.queue.submit(*(new_job(f"{n:08d}", f"t{n % num_tenants}") for n in numbers))
            if not all(isinstance(answer, calls.Accepted) for answer in answers):
                raise RuntimeError(f"a job was not accepted: {answers[0]}")

    def pull(self, worker: Worker, count: int) -> list[calls.LeasedJob]:
        """Lease so many jobs, 32 per call."""
        jobs: list[calls.LeasedJob] = []
        while len(jobs) < count:
            taken = worker.pull(sequences=min(NUM_LEASED, count - len(jobs))).jobs
            if not taken:
                raise RuntimeError(f"the queue gave {len(jobs)} of {count} jobs")
            jobs += taken
        return jobs

    def end(self, worker: Worker, jobs: Sequence[calls.LeasedJob]) -> None:
        """End jobs with one token each, 32 per call."""
        for begin in range(0, len(jobs), NUM_LEASED):
            chunk = jobs[begin : begin + NUM_LEASED]
            worker.advance(*(tokens(job, 0, 1) for job in chunk))
            worker.advance(*(ending(job, 1) for job in chunk))

    def worker(self, name: str = "w") -> Worker:
        """Register a worker that lives for the whole run."""
        worker = self.queue.worker(name)
        worker.beat(expiry_ms=EXPIRY_MS)
        return worker


@contextmanager
def bench() -> Generator[Bench]:
    """Start a fresh server with an empty queue."""
    with redis_server() as server:
        queue = Queue(server.client())
        queue.configure(max_waiting_jobs=10_000_000, max_outbox_entries=10_000_000)
        yield Bench(server, queue)


def by_queued_jobs(sizes: Sequence[int]) -> list[Curve]:
    """Measure submit, pull and end, and the memory of a job, with growing numbers of queued jobs.

    Memory is that of the jobs added since the previous size, without the outbox; below a thousand it is mostly the
    server's.
    """
    submit: list[Point] = []
    pull: list[Point] = []
    end: list[Point] = []
    memory: list[Point] = []
    with bench() as one:
        worker, num_queued = one.worker(), 0
        for size in sizes:
            used_bytes, num_new = one.used_bytes(), size - num_queued
            one.submit(num_new)
            one.queue.client.delete(one.queue.keys.outbox)
            num_queued = size
            if num_new >= NUM_MEASURED // 2:
                memory.append((size, (one.used_bytes() - used_bytes) / num_new))
            with one.counted(submit, size, NUM_MEASURED):
                one.submit(NUM_MEASURED)
            with one.counted(pull, size, NUM_MEASURED):
                jobs = one.pull(worker, NUM_MEASURED)
            with one.counted(end, size, NUM_MEASURED):
                one.end(worker, jobs)
            one.queue.client.delete(one.queue.keys.outbox)
    made = [("submit", submit), ("pull", pull), ("one token and end", end)]
    curves = [
        Curve(name=name, size="jobs queued", cost="server µs a job", expected=0.0, points=points)
        for name, points in made
    ]
    if len(memory) > 1:
        name, size_name = "memory of a queued job", "jobs queued"
        curves.append(Curve(name=name, size=size_name, cost="bytes a job", expected=0.0, points=memory))
    return curves


def by_tenants(sizes: Sequence[int]) -> list[Curve]:
    """Measure submit and pull with growing numbers of tenants."""
    submit: list[Point] = []
    pull: list[Point] = []
    for size in sizes:
        with bench() as one:
            one.queue.configure(mode="fair")
            one.submit(max(4 * NUM_MEASURED, 2 * size), size)
            with one.counted(submit, size, NUM_MEASURED):
                one.submit(NUM_MEASURED, size)
            worker = one.worker()
            with one.counted(pull, size, NUM_MEASURED):
                one.pull(worker, NUM_MEASURED)
    return [
        Curve(name="submit, mode fair", size="tenants", cost="server µs a job", expected=0.0, points=submit),
        Curve(name="pull, mode fair", size="tenants", cost="server µs a job", expected=0.0, points=pull),
    ]


def by_workers(sizes: Sequence[int]) -> list[Curve]:
    """Measure a beat, an empty pull and a pull of jobs with growing numbers of live workers, each with eight jobs."""
    beat: list[Point] = []
    empty: list[Point] = []
    pull: list[Point] = []
    for size in sizes:
        with bench() as one:
            workers = [one.worker(f"w{number}") for number in range(size)]
            one.submit(8 * size + NUM_MEASURED)
            held = {worker.name: [job.id for job in one.pull(worker, 8)] for worker in workers}
            with one.counted(pull, size, NUM_MEASURED):
                one.pull(workers[0], NUM_MEASURED)
            last = workers[-1]
            with one.counted(beat, size, NUM_CALLS):
                for _ in range(NUM_CALLS):
                    last.beat(*held[last.name], expiry_ms=EXPIRY_MS)
            with one.counted(empty, size, NUM_CALLS):
                for _ in range(NUM_CALLS):
                    last.pull()
    size_name = "workers alive"
    return [
        Curve(name="beat", size=size_name, cost="server µs a call", expected=0.0, points=beat),
        Curve(name="pull that finds nothing", size=size_name, cost="server µs a call", expected=0.0, points=empty),
        Curve(name="pull", size=size_name, cost="server µs a job", expected=0.0, points=pull),
    ]


def by_streams(sizes: Sequence[int]) -> list[Curve]:
    """Measure a token of each running job, as many per call of `advance` as it takes."""
    advance: list[Point] = []
    with bench() as one:
        worker = one.worker()
        for size in sizes:
            one.submit(size)
            jobs = one.pull(worker, size)
            with one.counted(advance, size, NUM_ROUNDS * size):
                for number in range(NUM_ROUNDS):
                    for begin in range(0, size, MAX_JOBS_PER_CALL):
                        chunk = jobs[begin : begin + MAX_JOBS_PER_CALL]
                        worker.advance(*(tokens(job, number, 1) for job in chunk))
    return [Curve(name="publish", size="jobs running", cost="server µs a token", expected=0.0, points=advance)]


def by_channel_length(sizes: Sequence[int]) -> list[Curve]:
    """Measure a token at the end of growing channels, and the memory of its tokens."""
    advance: list[Point] = []
    memory: list[Point] = []
    with bench() as one:
        worker = one.worker()
        one.submit(1)
        (job,) = one.pull(worker, 1)
        at, began_bytes = 0, one.used_bytes()
        for size in sizes:
            while at < size:
                worker.advance(tokens(job, at, 1))
                at += 1
            memory.append((size, (one.used_bytes() - began_bytes) / size))
            with one.counted(advance, size, NUM_CALLS):
                for _ in range(NUM_CALLS):
                    worker.advance(tokens(job, at, 1))
                    at += 1
    size_name = "tokens on the channel"
    return [
        Curve(name="publish", size=size_name, cost="server µs a token", expected=0.0, points=advance),
        Curve(name="memory of a channel", size=size_name, cost="bytes a token", expected=0.0, points=memory),
    ]


def by_open_readers(sizes: Sequence[int]) -> list[Curve]:
    """Measure readers of as many channels on one event loop, while 64 of their jobs get 20 tokens per second each.

    Tokens come at a fixed rate, so the cost of idle readers is divided by as many tokens at each size.
    """
    server: list[Point] = []
    client: list[Point] = []
    latency: list[Point] = []
    for size in sizes:
        with bench() as one:
            worker = one.worker()
            one.submit(size)
            jobs = one.pull(worker, size)
            costs = asyncio.run(_read(one, worker, jobs))
            for points, cost in zip((server, client, latency), costs, strict=True):
                points.append((size, cost))
    return [
        Curve(name="read", size="open readers", cost="server µs a token", expected=0.0, points=server),
        Curve(name="read", size="open readers", cost="client µs a token", expected=0.0, points=client),
        Curve(name="from publish to reader", size="open readers", cost="ms, median", expected=0.0, points=latency),
    ]


async def _read(one: Bench, worker: Worker, jobs: Sequence[calls.LeasedJob]) -> tuple[float, float, float]:
    """Return microseconds per token of the server, publishing included, and of this process; and the latency."""
    latencies_s: list[float] = []
    spoken, spoken_s = jobs[:NUM_SPEAKING], 0.0
    num_scripts = one.num_scripts()

    async def follow(producer: AsyncProducer, job_id: JobId) -> None:
        async for event in producer.stream(job_id):
            latencies_s.extend([time.perf_counter() - spoken_s] * len(event.token_ids))

    async with AsyncProducer(one.server.url, queue="q") as producer:
        readers = [asyncio.create_task(follow(producer, job.id)) for job in jobs]
        async with asyncio.timeout(LOOK_WITHIN_S):
            # Only the server's counter shows that each reader has read its job's state: there is no event.
            while one.num_scripts() < num_scripts + len(jobs):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        await asyncio.sleep(10)  # then their channels are silent
        before_us, cpu_s = one.spent_us(), time.process_time()
        for number in range(NUM_TOKENS_SPOKEN):
            spoken_s = time.perf_counter()
            await asyncio.to_thread(worker.advance, *(tokens(job, number, 1) for job in spoken))
            await asyncio.sleep(max(0.0, spoken_s + SPEAK_EVERY_S - time.perf_counter()))
        server_us, client_us = one.spent_us() - before_us, 1e6 * (time.process_time() - cpu_s)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    num_tokens = NUM_TOKENS_SPOKEN * len(spoken)
    if len(latencies_s) < 0.9 * num_tokens:
        raise RuntimeError(f"only {len(latencies_s)} of {num_tokens} tokens were read")
    return server_us / num_tokens, client_us / num_tokens, 1e3 * statistics.median(latencies_s)
