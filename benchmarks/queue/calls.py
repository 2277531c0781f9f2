"""The longest call of each script on a crowded queue: `python -m benchmarks calls`. Needs no model.

The queue is that of `tests/protocol/test_cost_grid.py`: of each thing `--crowd` (tenants with weights, timers that are
due, delayed, failed and lost jobs, jobs of one batch, and what another program may write), jobs with 64 choices, and
`--waiting` jobs of one more tenant. Each script is called with as many jobs as a call takes, `--calls` times. The
server's SLOWLOG says how long the server was held, and the kernel how long it ran. The first is elapsed time: other
work on the machine prolongs it, and the second only through caches.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
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
    """Yield a row for each script: how long its calls held the server and how long it ran, in milliseconds."""
    yield "script", "held, least", "held, longest", "ran, least", "ran, longest", f"over {LIMIT_MS:g} ms"
    client = crowd.queue.client
    for name in CALLS:
        client.script_load(load(name).source)
    for name in CALLS:
        make = submitting(num_calls) if name == "submit" else CALLS[name]
        held_ms, ran_ms = zip(*(called_ms(crowd, make(crowd)) for _ in range(num_calls)), strict=True)
        is_over = "held" if max(held_ms) > LIMIT_MS else ""
        is_over = "ran" if max(ran_ms) > LIMIT_MS else is_over
        yield name, *(f"{ms:.2f}" for ms in (min(held_ms), max(held_ms), min(ran_ms), max(ran_ms))), is_over


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


def called_ms(crowd: Crowd, call: calls.Call[Any]) -> tuple[float, float]:
    """Call a script once; return how long that held the server, `LOGGED_MS` if not longer, and how long it ran."""
    client = crowd.queue.client
    # The first field: nanoseconds on a processor, of the main thread.
    ran = Path(f"/proc/{client.info('server')['process_id']}/schedstat")
    client.config_set("slowlog-log-slower-than", round(LOGGED_MS * 1000))
    client.slowlog_reset()
    before = int(ran.read_text().split()[0])
    crowd.queue.run(call)
    ran_ms = (int(ran.read_text().split()[0]) - before) / 1e6
    client.config_set("slowlog-log-slower-than", -1)
    entries: list[dict[str, Any]] = client.slowlog_get(128)  # Any: redis-py's replies
    held_ms = (entry["duration"] / 1000 for entry in entries if entry["command"].startswith(b"EVALSHA"))
    return max(held_ms, default=LOGGED_MS), ran_ms
