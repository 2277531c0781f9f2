"""The longest call of each script on a crowded queue: `python -m benchmarks calls`. Needs no model.

The queue is that of `tests/protocol/test_cost_grid.py`: of each thing `--crowd` (tenants with weights, timers that are
due, delayed, failed and lost jobs, jobs of one batch, and what another program may write), jobs with 64 choices, and
`--waiting` jobs of one more tenant. Each script is called with as many jobs as a call takes, `--calls` times, and the
server's SLOWLOG says how long the server was held. That is elapsed time: other work on the machine prolongs it.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks.tables import table
from sluice.protocol import calls, limits
from sluice.protocol.scripts import load
from tests.protocol.driving import Queue, new_job
from tests.protocol.test_cost_grid import CALLS, HOUR_MS, Crowd, Make, crowd_of
from tests.servers import redis_server

LIMIT_MS = 5.0
LOGGED_MS = 0.1
"""The server logs nothing shorter: else it would log each command of a script, which takes longer than they do."""

MANY = 10**9


def main() -> None:
    """Measure on a server of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crowd", type=int, default=10_000, help="tenants, timers and so on (default 10000)")
    parser.add_argument("--waiting", type=int, default=100_000, help="further waiting jobs (default 100000)")
    parser.add_argument("--calls", type=int, default=3, help="calls of each script (default 3)")
    options = parser.parse_args()
    with redis_server("valkey") as server, server.client() as client:
        queue = Queue(client)
        fill(queue, options.waiting)
        print(table(list(rows(crowd_of(queue, options.crowd), options.calls))))


def fill(queue: Queue, num_waiting: int) -> None:
    """Let so many jobs of one tenant wait, in a queue that takes all."""
    queue.stop_clock()
    bounds = dict.fromkeys(("max_waiting_jobs", "max_waiting_tokens", "max_waiting_bytes", "max_outbox_entries"), MANY)
    queue.configure(**bounds)
    for begin in range(0, num_waiting, limits.MAX_JOBS_PER_CALL):
        numbers = range(begin, min(num_waiting, begin + limits.MAX_JOBS_PER_CALL))
        queue.submit(*(new_job(f"{number:024x}", "backlog") for number in numbers))


def rows(crowd: Crowd, num_calls: int) -> Iterator[tuple[object, ...]]:
    """Yield a row for each script: the shortest and the longest of its calls, in milliseconds."""
    yield "script", "least, ms", "longest, ms", f"over {LIMIT_MS:g} ms"
    client = crowd.queue.client
    for name in CALLS:
        client.script_load(load(name).source)
    for name in CALLS:
        make = submitting(num_calls) if name == "submit" else CALLS[name]
        taken_ms = [called_ms(crowd, make(crowd)) for _ in range(num_calls)]
        is_over = "yes" if max(taken_ms) > LIMIT_MS else ""
        yield name, f"{min(taken_ms):.2f}", f"{max(taken_ms):.2f}", is_over


def submitting(num_calls: int) -> Make:
    """Return a maker of submits, each of other jobs: a second submit of the same ones would be short."""
    numbers = iter(range(num_calls))

    def make(crowd: Crowd) -> calls.Call[Any]:
        number = next(numbers)
        jobs = [
            new_job(f"n{number}", f"t{i}", batch="big", idempotency_key=f"n{number}", ttl_ms=HOUR_MS)
            for i in range(limits.MAX_JOBS_PER_CALL)
        ]
        return calls.submit(crowd.queue.keys, jobs)

    return make


def called_ms(crowd: Crowd, call: calls.Call[Any]) -> float:
    """Call a script once; return how long that held the server, `LOGGED_MS` if it was not longer."""
    client = crowd.queue.client
    client.config_set("slowlog-log-slower-than", round(LOGGED_MS * 1000))
    client.slowlog_reset()
    crowd.queue.run(call)
    client.config_set("slowlog-log-slower-than", -1)
    entries: list[dict[str, Any]] = client.slowlog_get(128)  # Any: redis-py's replies
    taken_ms = (entry["duration"] / 1000 for entry in entries if entry["command"].startswith(b"EVALSHA"))
    return max(taken_ms, default=LOGGED_MS)
