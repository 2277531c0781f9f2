"""Query times of a large history: `python -m benchmarks history`, a million jobs by default.

A fresh SQLite file and a fresh PostgreSQL are filled with jobs of thirty days: two queues, fifty tenants, one job in
five in a batch of a thousand, three attempts for one in a hundred. The database itself generates the rows, with the
tables and indexes of the migrations. Then each typical query runs several times, through `producer.history` or with the
SQL of docs/guide/history.md; median and maximum are printed next to the limit. The last column is the time of the same
query with a tenth of the rows: a page served by an index does not change.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.producer.contract.database import open_database
from sluice.producer.contract.tables import HOUR_MS, hourly_goodput, hourly_latency
from sluice.producer.history.queries import History, JobFilter
from sluice.worker.history.migrate import migrate
from tests.postgres import has_postgres, postgres_server

NUM_DAYS, NUM_TENANTS, NUM_PER_BATCH = 30, 50, 1000
DAY_MS = 24 * HOUR_MS
BEGIN_MS = 1_800_057_600_000
"""2027-01-16 00:00 UTC."""

END_MS = BEGIN_MS + NUM_DAYS * DAY_MS
PAGE_LIMIT_S, PERCENTILES_LIMIT_S = 0.050, 1.0
CHUNK = 100_000
QUEUES = ("bulk", "chat")


@dataclass(frozen=True, slots=True)
class Question:
    """A query, and its time limit."""

    name: str
    limit_s: float
    ask: Callable[[], object]


def main() -> None:
    """Fill each database, query, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1_000_000, help="rows in the end")
    parser.add_argument("--rounds", type=int, default=5, help="how often each question is asked")
    parser.add_argument("--database", choices=["sqlite", "postgres", "both"], default="both")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        for name, url in _databases(arguments.database, stack):
            measure(name, url, arguments.jobs, arguments.rounds)


def measure(name: str, url: str, num_jobs: int, rounds: int) -> None:
    """Print the time of each query, first with a tenth of the jobs, then with all of them."""
    engine = open_database(url, is_writer=True)
    migrate(engine)
    small = num_jobs // 10
    fill(engine, 0, small)
    with History(url) as history:
        before = {question.name: _seconds(question, rounds) for question in questions(history, engine, small)}
        fill(engine, small, num_jobs)
        print(f"\n{name}, {num_jobs} jobs\n{'question':<44}{'median ms':>10}{'longest':>9}{'limit':>7}{'tenth':>8}")
        for question in questions(history, engine, num_jobs):
            took = _seconds(question, rounds)
            figures = (statistics.median(took), max(took), question.limit_s, statistics.median(before[question.name]))
            late = "  too slow" if figures[0] > question.limit_s else ""
            cells = "".join(f"{1000 * s:>{width}.{digits}f}" for s, width, digits in zip(figures, *_SHAPE, strict=True))
            print(f"{question.name:<44}{cells}{late}")
    engine.dispose()


_SHAPE = (10, 9, 7, 8), (1, 1, 0, 1)


def questions(history: History, engine: Engine, num_jobs: int) -> Sequence[Question]:
    """Return the typical pages and percentiles."""
    newest_day_ms = END_MS - DAY_MS
    a_job = _id(num_jobs // 2)
    a_batch = f"nightly-{num_jobs // 2 // 5 // NUM_PER_BATCH:05d}"

    def page(wanted: JobFilter) -> Callable[[], object]:
        return lambda: history.jobs(wanted, limit=50)

    def of_view(query: sa.Select[*tuple[object, ...]]) -> Callable[[], object]:
        return lambda: _all(engine, query)

    last_hours = hourly_latency.c.hour_ms >= newest_day_ms
    return (
        Question("newest jobs of a queue", PAGE_LIMIT_S, page(JobFilter(queue="chat"))),
        Question("newest jobs of a tenant", PAGE_LIMIT_S, page(JobFilter(queue="chat", tenant="tenant-7"))),
        Question("newest failed jobs", PAGE_LIMIT_S, page(JobFilter(queue="chat", state="failed"))),
        Question("newest failed jobs of a tenant", PAGE_LIMIT_S, page(JobFilter(tenant="tenant-7", state="failed"))),
        Question("what runs now", PAGE_LIMIT_S, page(JobFilter(queue="chat", state="running"))),
        Question("jobs of a batch", PAGE_LIMIT_S, page(JobFilter(queue="bulk", batch=a_batch))),
        Question("progress of a batch", PAGE_LIMIT_S, lambda: history.batch("bulk", a_batch)),
        Question("one job", PAGE_LIMIT_S, lambda: history.job(QUEUES, a_job)),
        Question("timeline of a job", PAGE_LIMIT_S, lambda: history.timeline(QUEUES, a_job)),
        Question(
            "jobs by state, last hour",
            PAGE_LIMIT_S,
            lambda: history.counts(JobFilter(queue="chat", since_ms=END_MS - HOUR_MS)),
        ),
        Question(
            "percentiles of one hour (view)",
            PERCENTILES_LIMIT_S,
            of_view(
                sa.select(hourly_latency).where(
                    hourly_latency.c.queue == "chat", hourly_latency.c.hour_ms == END_MS - 2 * HOUR_MS
                )
            ),
        ),
        Question(
            "percentiles of 24 hours, by hour (view)",
            PERCENTILES_LIMIT_S,
            of_view(sa.select(hourly_latency).where(hourly_latency.c.queue == "chat", last_hours)),
        ),
        Question(
            "percentiles of the last day",
            PERCENTILES_LIMIT_S,
            lambda: history.latency(JobFilter(queue="chat", since_ms=newest_day_ms)),
        ),
        Question(
            "goodput of 24 hours, by hour (view)",
            PERCENTILES_LIMIT_S,
            of_view(sa.select(hourly_goodput).where(hourly_goodput.c.hour_ms >= newest_day_ms)),
        ),
    )


def _seconds(question: Question, rounds: int) -> list[float]:
    took: list[float] = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        question.ask()
        took.append(time.perf_counter() - began_s)
    return took


def _all(engine: Engine, query: sa.Select[*tuple[object, ...]]) -> Sequence[object]:
    with engine.connect() as connection:
        return connection.execute(query).all()


def _id(number: int) -> str:
    return f"0.tenant-{number % NUM_TENANTS}.{number:08d}"


def _databases(which: str, stack: ExitStack) -> Iterator[tuple[str, str]]:
    if which in ("sqlite", "both"):
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        yield "SQLite", f"sqlite:///{folder}/history.db"
    if which in ("postgres", "both") and has_postgres():
        server = stack.enter_context(postgres_server(is_durable=True))
        yield "PostgreSQL", server.url(server.create_database())


# ---------------------------------------------------------------- rows, made by the database


def fill(engine: Engine, begin: int, end: int) -> None:
    """Add jobs number `begin` to `end`, evenly over the days, in slices, each a transaction."""
    is_sqlite = engine.dialect.name == "sqlite"
    for at in range(begin, end, CHUNK):
        numbers = _numbers(at, min(at + CHUNK, end), is_sqlite=is_sqlite)
        with engine.begin() as connection:
            connection.execute(sa.text(_jobs(numbers, end, is_sqlite=is_sqlite)))
            connection.execute(sa.text(_attempts(numbers, end, is_sqlite=is_sqlite)))
    if not is_sqlite:  # as autovacuum does; SQLite needs it explicitly
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE")


def _numbers(begin: int, end: int, *, is_sqlite: bool) -> str:
    if is_sqlite:
        return (
            f"WITH RECURSIVE numbers(i) AS (SELECT {begin} UNION ALL SELECT i + 1 FROM numbers WHERE i + 1 < {end})"
            " SELECT i FROM numbers"
        )
    return f"SELECT i FROM generate_series({begin}, {end - 1}) AS numbers(i)"


def _dice(salt: int) -> str:
    """Return 0 to 999, evenly, from the row's number: the same on both databases."""
    return f"(i % 1000 * {7919 + 2 * salt} + i / 1000 * {104_729 + salt}) % 1000"


def _padded(number: str, width: int, *, is_sqlite: bool) -> str:
    return f"printf('%0{width}d', {number})" if is_sqlite else f"lpad(({number})::text, {width}, '0')"


def _submitted(num_jobs: int) -> str:
    return f"{BEGIN_MS} + CAST(i AS BIGINT) * {NUM_DAYS * DAY_MS} / {num_jobs}"


def _jobs(numbers: str, num_jobs: int, *, is_sqlite: bool) -> str:
    cast = "" if is_sqlite else "::jsonb"
    is_bulk = "i % 5 = 0"
    is_under_way = f"i >= {num_jobs - 300}"
    state = (
        f"CASE WHEN {is_under_way} THEN CASE WHEN i % 3 = 0 THEN 'running' ELSE 'queued' END"
        f" WHEN {_dice(1)} < 30 THEN 'failed' WHEN {_dice(1)} < 50 THEN 'cancelled' ELSE 'done' END"
    )
    tokens = f"(20 + {_dice(2)} % 400)"
    queued_ms, prefill_ms, gap_ms = f"({_dice(3)} / 3)", f"(300 + {_dice(4)})", f"(15 + {_dice(5)} / 40)"
    ended = f"(submitted + {queued_ms} + {prefill_ms} + ({tokens} - 1) * {gap_ms})"
    columns = {
        "id": f"'0.tenant-' || (i % {NUM_TENANTS}) || '.' || {_padded('i', 8, is_sqlite=is_sqlite)}",
        "queue": f"CASE WHEN {is_bulk} THEN 'bulk' ELSE 'chat' END",
        "partition": "0",
        "tenant": f"'tenant-' || (i % {NUM_TENANTS})",
        "version": "3",
        "state": state,
        "reason": "'length'",
        "error_code": f"CASE WHEN {_dice(1)} < 30 THEN 'nan_logits' END",
        "worker": "'gpu-' || (i % 8)",
        "finished_ms": f"CASE WHEN NOT {is_under_way} THEN {ended} END",
        "model": "'llama-3-8b'",
        "prompt_tokens": f"{_dice(6)} + 16",
        "cached_tokens": "0",
        "output_tokens": tokens,
        "scheduled_ms": f"submitted + {queued_ms}",
        "first_token_ms": f"submitted + {queued_ms} + {prefill_ms}",
        "itl_p50_s": f"{gap_ms} / 1000.0",
        "itl_p99_s": f"{gap_ms} / 400.0",
        "itl_max_s": f"{gap_ms} / 200.0",
        "exactness": "'undisturbed'",
        "submitted_ms": "submitted",
        "priority": "4",
        "choices": "1",
        "estimated_prompt_tokens": f"{_dice(6)} + 20",
        "cost": "512",
        "seed": "'4242424242'",
        "batch": (
            f"CASE WHEN {is_bulk} THEN 'nightly-' || {_padded(f'i / 5 / {NUM_PER_BATCH}', 5, is_sqlite=is_sqlite)} END"
        ),
        "options": f'\'{{"max_tokens": 256, "temperature": 0.7}}\'{cast}',
        "pulled_ms": f"submitted + {queued_ms}",
        "attempts": "CASE WHEN i % 100 = 0 THEN 3 ELSE 1 END",
    }
    values = ", ".join(columns.values())
    return (
        f"INSERT INTO jobs ({', '.join(columns)}) SELECT {values}"
        f" FROM (SELECT i, {_submitted(num_jobs)} AS submitted FROM ({numbers}) AS numbers) AS made"
    )


def _attempts(numbers: str, num_jobs: int, *, is_sqlite: bool) -> str:
    epochs = "SELECT 1 AS epoch UNION ALL SELECT 2 UNION ALL SELECT 3"
    job_id = f"'0.tenant-' || (i % {NUM_TENANTS}) || '.' || {_padded('i', 8, is_sqlite=is_sqlite)}"
    submitted = _submitted(num_jobs)
    return (
        "INSERT INTO attempts (job_id, submitted_ms, epoch, attempt, incarnation, started_ms, ended_ms, outcome)"
        f" SELECT {job_id}, {submitted}, epoch, epoch, 'gpu-' || (i % 8), {submitted}, {submitted} + 5000,"
        " CASE WHEN epoch < 3 AND i % 100 = 0 THEN 'returned' ELSE 'done' END"
        f" FROM ({numbers}) AS numbers CROSS JOIN ({epochs}) AS epochs WHERE epoch = 1 OR i % 100 = 0"
    )


if __name__ == "__main__":
    main()
