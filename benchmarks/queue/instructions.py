"""Instructions that the server spends on a job, by callgrind: they do not depend on the machine's other work.

Needs `valgrind` (apt install valgrind). The server runs under it, some fifty times slower; figures are differences
between two dumps, so its start and the first compilation of scripts do not count.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis

from benchmarks.tables import table
from sluice.protocol.calls import LeasedJob, NewJob, Progress, QueueSettings, configure
from sluice.protocol.keys import QueueKeys
from sluice.protocol.limits import MAX_JOBS_PER_CALL, PULL_JOBS
from sluice.protocol.redis.execution import no_retry, run
from tests.protocol.driving import Queue, Worker, ending, new_job, tokens
from tests.servers import binary_of

NUM_JOBS = 256
NUM_TOKENS = 20
PROMPT = b"x" * 400
CASES = (
    (1, MAX_JOBS_PER_CALL, PULL_JOBS, True),
    (1, MAX_JOBS_PER_CALL, PULL_JOBS, False),
    (50, MAX_JOBS_PER_CALL, PULL_JOBS, True),
    (50, MAX_JOBS_PER_CALL, PULL_JOBS, False),
    (1, 1, 1, True),
)
"""Tenants, jobs in a submit, jobs in a pull and in an end, and whether jobs have a channel."""

START_S = 60
DUMP_S = 20


class CountedServer:
    """A Redis under callgrind. Changes: each look counts from the one before."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._folder, self._num_dumps = process, folder, 0
        self.client = redis.Redis(unix_socket_path=str(folder / "socket"), retry=no_retry(), socket_timeout=120)

    def wait_until_it_answers(self) -> None:
        """Wait for its start.

        Raises:
            RuntimeError: it did not start.
        """
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and self._process.poll() is None:
            try:
                self.client.ping()
            except redis.ConnectionError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"the server under valgrind did not start: {(self._folder / 'log').read_text()[-500:]}")

    def instructions(self) -> int:
        """Return how many it has executed since the last look."""
        self._num_dumps += 1
        subprocess.run(["callgrind_control", "-d", str(self._process.pid)], stdout=subprocess.DEVNULL, check=True)
        dump, until_s = self._folder / f"out.{self._num_dumps}", time.monotonic() + DUMP_S
        while time.monotonic() < until_s:
            found = re.search(r"^(?:totals|summary): (\d+)", dump.read_text("latin-1"), re.M) if dump.exists() else None
            if found:
                return int(found[1])
            time.sleep(0.05)
        raise RuntimeError("callgrind wrote no dump")


@contextmanager
def counted_server() -> Generator[CountedServer]:
    """Start a server under callgrind, in a folder of its own."""
    valgrind, binary = shutil.which("valgrind"), binary_of("redis-7.0")
    if valgrind is None or binary is None:
        raise RuntimeError("this benchmark needs `valgrind` and `redis-server`: apt install valgrind redis-server")
    with tempfile.TemporaryDirectory(prefix="callgrind_") as name:
        folder = Path(name)
        command = [
            valgrind, "--tool=callgrind", f"--callgrind-out-file={folder / 'out'}", "--quiet", str(binary),
            "--port", "0", "--unixsocket", str(folder / "socket"), "--save", "", "--appendonly", "no", "--dir", name,
            "--maxmemory-policy", "noeviction", "--hz", "1", "--activerehashing", "no",
        ]  # fmt: skip
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            server = CountedServer(process, folder)
            server.wait_until_it_answers()
            yield server
        finally:
            process.kill()
            process.wait()


class Round:
    """One queue on the server. Changes: it numbers its jobs."""

    def __init__(self, server: CountedServer, name: str, num_tenants: int, *, is_followed: bool = True) -> None:
        self.queue, self.num_tenants, self.num_jobs = Queue(server.client, QueueKeys(name)), num_tenants, 0
        self.is_followed = is_followed
        run(
            server.client,
            configure(self.queue.keys, QueueSettings(max_waiting_jobs=10_000_000, max_outbox_entries=10_000_000)),
        )
        self.worker = Worker(self.queue, "worker-1-0123456789abcdef")
        self.worker.beat(expiry_ms=3_600_000)

    def submit(self, count: int, at_once: int) -> None:
        """Submit jobs of alternating tenants."""
        for start in range(0, count, at_once):
            numbers = range(self.num_jobs, self.num_jobs + min(at_once, count - start))
            self.num_jobs += len(numbers)
            self.queue.submit(*map(self._new_job, numbers))

    def _new_job(self, number: int) -> NewJob:
        tenant = f"tenant{number % self.num_tenants}"
        return new_job(f"{number:024x}", tenant, payload=PROMPT, prompt_bytes=len(PROMPT))

    def pull(self, count: int, at_once: int) -> list[LeasedJob]:
        """Lease jobs."""
        jobs: list[LeasedJob] = []
        while len(jobs) < count:
            jobs += self.worker.pull_only(sequences=at_once).jobs
        return jobs

    def end(self, jobs: Sequence[LeasedJob], at_once: int) -> None:
        """End jobs, each with its tokens."""
        for start in range(0, len(jobs), at_once):
            self.worker.advance(*(self._last(job) for job in jobs[start : start + at_once]))

    def _last(self, job: LeasedJob) -> Progress:
        now = job.pulled_ms
        last = ending(job, 0, NUM_TOKENS) if self.is_followed else ending(job, 0, NUM_TOKENS, entry=b"")
        return last._replace(
            entry=last.entry if self.is_followed else b"",
            first_scheduled_ms=now, first_token_ms=now, prompt_tokens=10, fingerprint="0123456789abcdef",
            resolved=b"\x98\x01 \x00\x01\x00\x00\x01\x91\x02",
        )  # fmt: skip

    def stream(self, jobs: Sequence[LeasedJob], rounds: int) -> None:
        """Send one token of each job a round, as streams do."""
        for at in range(rounds):
            self.worker.advance(*(tokens(job, at, 1) for job in jobs))

    def clear_outbox(self) -> None:
        """As a recorder does."""
        self.queue.client.delete(self.queue.keys.outbox)


def phases(
    server: CountedServer, num_tenants: int, submitted: int, pulled: int, *, is_followed: bool
) -> Iterator[tuple[str, float]]:
    """Yield each phase of a job's life with its instructions per job, after a small round that warms the server."""
    name = f"q{num_tenants}x{pulled}x{is_followed}"
    one, count = Round(server, name, num_tenants, is_followed=is_followed), NUM_JOBS if pulled > 1 else PULL_JOBS
    one.submit(2 * PULL_JOBS, submitted)
    one.end(one.pull(2 * PULL_JOBS, pulled), pulled)
    one.clear_outbox()
    server.instructions()
    one.submit(count, submitted)
    yield "submit", server.instructions() / count
    jobs = one.pull(count, pulled)
    yield "pull", server.instructions() / count
    one.end(jobs, pulled)
    yield "end", server.instructions() / count


def others(server: CountedServer) -> Iterator[tuple[str, float]]:
    """Yield the instructions of an empty pull, a heartbeat, maintenance, and a streamed token among 50 streams."""
    one = Round(server, "others", 1)
    one.worker.pull()
    one.worker.beat()
    server.instructions()
    one.worker.maintain()
    idle = {
        "an empty pull": one.worker.pull_only,
        "a heartbeat": one.worker.beat_only,
        "maintenance": one.worker.maintain,
    }
    for what, act in idle.items():
        yield what, _each(server, act)
    one.submit(50, 50)
    jobs = one.pull(50, 50)
    one.stream(jobs, 1)
    server.instructions()
    for at in range(1, 9):
        one.worker.advance(*(tokens(job, at, 1) for job in jobs))
    yield "a streamed token", server.instructions() / (8 * len(jobs))


def _each(server: CountedServer, act: Callable[[], object], times: int = 8) -> float:
    for _ in range(times):
        act()
    return server.instructions() / times


def main() -> int:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows: list[tuple[str, ...]] = []
    with counted_server() as server:
        for num_tenants, submitted, pulled, is_followed in CASES:
            found = dict(phases(server, num_tenants, submitted, pulled, is_followed=is_followed))
            drained = found["pull"] + found["end"]
            values = (found["submit"], found["pull"], found["end"], drained)
            case = (str(num_tenants), f"{submitted} / {pulled}", "yes" if is_followed else "no")
            rows.append((*case, *(f"{value / 1000:.0f}" for value in values)))
        single = [(what, f"{value / 1000:.0f}") for what, value in others(server)]
    print("Thousand instructions of the server per job\n")
    print(table([("tenants", "jobs a call, submit / pull", "channel", "submit", "pull", "end", "drained"), *rows]))
    print()
    print(table([("call", "thousand instructions"), *single]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
