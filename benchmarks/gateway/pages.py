"""How long the gateway's page reads a long history: fill a database with a day of jobs, then read as each page does.

    python -m benchmarks.gateway.pages sqlite:////tmp/pages.db --jobs 800000
    python -m benchmarks.gateway.pages postgresql://postgres@127.0.0.1/pages --jobs 800000

The database must be empty or filled by this command. Prints the median and the longest of 5 readings of each, in ms.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median

import sqlalchemy as sa

from sluice.producer.contract.database import open_database
from sluice.producer.contract.tables import batches, jobs
from sluice.producer.gateway.tables.database import Database
from sluice.producer.gateway.ui.read.batchlist import BatchList
from sluice.producer.gateway.ui.read.day import DayUsage
from sluice.producer.gateway.ui.read.joblist import Wanted, page_of_jobs
from sluice.producer.gateway.ui.read.latencies import counts_of_tenant
from sluice.producer.gateway.ui.read.usage import prices_now, ttft_by_tenant
from sluice.worker.history.migrate import migrate
from sluice.worker.history.writer import HistoryWriter

DAY_MS = 86_400_000
NUM_TENANTS, NUM_BATCHES, NUM_READINGS, ROWS_AT_ONCE = 20, 50, 5, 10_000
STATES = ("done",) * 97 + ("failed", "cancelled", "running")
QUEUE = "q"


def rows(number: int) -> Iterator[Mapping[str, object]]:
    """Yield the jobs of the last day, the oldest first."""
    end_ms = round(time.time() * 1000)
    for one in range(number):
        state, submitted_ms = STATES[one % 100], end_ms - DAY_MS + one * DAY_MS // number
        tenant = f"t{one % NUM_TENANTS}"
        yield {
            "id": f"0.{tenant}.{one:08x}",
            "queue": QUEUE,
            "partition": 0,
            "tenant": tenant,
            "submitted_ms": submitted_ms,
            "first_token_ms": submitted_ms + 200,
            "finished_ms": None if state == "running" else submitted_ms + 2000,
            "version": 3,
            "state": state,
            "error_code": "engine_error" if state == "failed" else None,
            "error": "the engine failed" if state == "failed" else None,
            "model": "small",
            "priority": 0,
            "batch": f"b{one % NUM_BATCHES}",
            "prompt_tokens": 100,
            "cached_tokens": 10,
            "output_tokens": 50,
            "options": {"max_tokens": 256, "temperature": 1.0, "stop": []},
            "metadata": {"user": "17"},
        }


def fill(url: str, number: int) -> None:
    """Create the tables, write the jobs, and count their batches."""
    engine = open_database(url, is_writer=True)
    migrate(engine)
    slice_of: list[Mapping[str, object]] = []
    for row in rows(number):
        slice_of.append(row)
        if len(slice_of) == ROWS_AT_ONCE:
            with engine.begin() as connection:
                connection.execute(sa.insert(jobs), slice_of)
            slice_of = []
    names = [f"b{one}" for one in range(NUM_BATCHES)]
    with engine.begin() as connection:
        if slice_of:
            connection.execute(sa.insert(jobs), slice_of)
        now_ms = round(time.time() * 1000)
        created = [{"queue": QUEUE, "id": name, "created_ms": now_ms - DAY_MS} for name in names]
        connection.execute(sa.insert(batches), created)
        connection.execute(sa.text("ANALYZE"))
    writer = HistoryWriter(engine)
    for name in names:
        writer.count_batch((QUEUE, name), now_ms=now_ms)
    engine.dispose()


def is_filled(url: str) -> bool:
    """Return whether the database has jobs."""
    engine = open_database(url)
    try:
        with engine.connect() as connection:
            return connection.execute(sa.select(jobs.c.id).limit(1)).first() is not None
    except Exception:  # noqa: BLE001  # it has no tables yet
        return False
    finally:
        engine.dispose()


def readings(database: Database) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what each page reads."""
    day, queues = DayUsage(database, [QUEUE]), [QUEUE]
    runner = asyncio.Runner()
    yield "tenants: usage, first view", lambda: runner.run(DayUsage(database, queues).get())
    yield "tenants: usage, whole day once", lambda: runner.run(DayUsage(database, queues).get(wait_s=600))
    runner.run(day.get(wait_s=600))
    yield "tenants: usage", lambda: runner.run(day.get())
    yield "tenants: latency", lambda: ttft_by_tenant(database, queues, None)
    yield "tenants: prices", lambda: prices_now(database)
    found = BatchList(database, queues)
    yield "batches of all", lambda: runner.run(found.get(None))
    yield "batches of a tenant, first view", lambda: runner.run(BatchList(database, queues).get("t3"))
    runner.run(found.get("t3", wait_s=600))
    yield "batches of a tenant", lambda: runner.run(found.get("t3"))
    yield "jobs of all", lambda: page_of_jobs(database, Wanted(queues=queues))
    yield "jobs of a tenant", lambda: page_of_jobs(database, Wanted(queues=queues, tenant="t3"))
    yield "overview of a tenant", lambda: counts_of_tenant(database, "t3", queues)


def main() -> None:
    """Fill and measure."""
    parser = argparse.ArgumentParser(description="Time what the gateway's page reads from a long history.")
    parser.add_argument("url")
    parser.add_argument("--jobs", type=int, default=800_000)
    given = parser.parse_args()
    if not is_filled(given.url):
        fill(given.url, given.jobs)
    with Database(given.url) as database:
        for name, read in readings(database):
            taken_ms: list[float] = []
            for _ in range(NUM_READINGS):
                began_s = time.perf_counter()
                read()
                taken_ms.append(1000 * (time.perf_counter() - began_s))
            print(f"{name:32} {median(taken_ms):8.1f} {max(taken_ms):8.1f}", flush=True)


if __name__ == "__main__":
    main()
