"""Cost of waking idle workers: the server's processor time for one lone submit.

    python -m benchmarks wakeups [--workers 1,8,64] [--rounds 20]

The workers are real ones with the null model, on threads of this process. A job asks for one token, and comes when all
workers are idle again. Each round measures a second without submits and one with five; its difference is what a submit
costs, from the script that takes it to the end of its job. Printed are medians of the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.queue.plain_server import PlainServer, plain_server, version_of_server
from benchmarks.service.parts import wait_until
from sluice.producer.client import Producer
from sluice.worker.config.schema import LogConfig
from sluice.worker.log import configure_logs
from tests.integration.workers import running_worker

SETTLE_S = 3.0
PER_ROUND, BETWEEN_S = 5, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the server does."""

    ms: float
    """Processor time of the server's main thread."""

    scripts: float

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(ms=self.ms - other.ms, scripts=self.scripts - other.scripts)


def spent(server: PlainServer) -> Cost:
    """Return what the server has done so far."""
    cpu, commands = server.client.info("cpu"), server.client.info("commandstats")
    cpu_s = cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"]
    return Cost(ms=1000 * cpu_s, scripts=commands["cmdstat_evalsha"]["calls"])


def spent_in(server: PlainServer, work: Callable[[], object]) -> Cost:
    """Return what the server does in a second, with `work` five times in it."""
    before, until_s = spent(server), time.monotonic()
    for _ in range(PER_ROUND):
        work()
        until_s += BETWEEN_S
        time.sleep(max(0.0, until_s - time.monotonic()))
    return spent(server) - before


def measure(num_workers: int, num_rounds: int) -> tuple[Cost, Cost]:
    """Return the costs of a lone submit, and of a second without one."""
    submits, idles = list[Cost](), list[Cost]()
    with ExitStack() as stack:
        server = stack.enter_context(plain_server())
        for _ in range(num_workers):
            stack.enter_context(running_worker(server.url, beat__every_s=1.0, beat__life_s=4.0))
        producer = stack.enter_context(Producer(server.url))
        wait_until(lambda: len(producer.queue()[0].workers) == num_workers, "all workers to start")
        producer.submit("x", max_tokens=1)
        time.sleep(SETTLE_S)
        for _ in range(num_rounds):
            idles.append(spent_in(server, lambda: None))
            submits.append(spent_in(server, lambda: producer.submit("x", max_tokens=1)) - idles[-1])
    of_submits = median(submits)
    return Cost(ms=of_submits.ms / PER_ROUND, scripts=of_submits.scripts / PER_ROUND), median(idles)


def median(costs: list[Cost]) -> Cost:
    """Return the median of each figure separately."""
    return Cost(ms=statistics.median(one.ms for one in costs), scripts=statistics.median(one.scripts for one in costs))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="1,8,64", help="numbers of idle workers (default 1,8,64)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds for each number (default 20)")
    chosen = parser.parse_args()
    configure_logs(LogConfig(level="error"))
    print(version_of_server())
    print(f"{'idle workers':>12} {'ms per submit':>14} {'scripts':>8} {'idle: ms per s':>15} {'scripts':>8}")
    for number in map(int, chosen.workers.split(",")):
        submit, idle = measure(number, chosen.rounds)
        print(f"{number:12} {submit.ms:14.2f} {submit.scripts:8.1f} {idle.ms:15.1f} {idle.scripts:8.1f}", flush=True)


if __name__ == "__main__":
    main()
