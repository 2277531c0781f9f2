"""Throughput of the recorder from the outbox into SQL: `python -m benchmarks recorder`.

A real Valkey is filled with the events of many jobs, in entries as large as the scripts write (256 submits, 32 starts,
8 ends per call). Then one recorder drains it into a fresh SQLite file and a fresh PostgreSQL, with durable commits. Two
passes: `burst`, where all events of a job are adjacent and fold into one row before they reach SQL; and `apart`, where
each event updates the row written by the one before.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence

import structlog

from sluice.producer.contract.database import open_database
from sluice.worker.connection.clients import Client, connect
from sluice.worker.history.migrate import migrate
from sluice.worker.history.recorder import Recorder, RecorderSettings
from sluice.worker.history.writer import HistoryWriter
from tests.postgres import has_postgres, postgres_server
from tests.servers import redis_server
from tests.worker.history import events as e

SUBMITS_PER_CALL, STARTS_PER_CALL, ENDS_PER_CALL = 256, 32, 8


def main() -> None:
    """Measure both databases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs per pass")
    parser.add_argument("--database", choices=["sqlite", "postgres", "both"], default="both")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    print(f"{'database':<12}{'pass':<8}{'jobs':>8}{'events':>9}{'seconds':>9}{'cpu s':>8}{'events/s':>10}{'rows/s':>9}")
    with redis_server() as server:
        for name, url in _databases(arguments.database):
            measure(name, url, connect(server.url, timeout_s=60), arguments.jobs)


def measure(name: str, url: str, client: Client, num_jobs: int) -> None:
    """Run both passes into one fresh database."""
    engine = open_database(url, is_writer=True)
    migrate(engine)
    recorder = Recorder(client, HistoryWriter(engine), RecorderSettings(queue=e.QUEUE, name="bench"))
    job_ids = [f"0.acme.burst{number:08d}" for number in range(num_jobs)]
    _fill(client, _together(job_ids))
    _report(name, "burst", recorder, num_events=3 * num_jobs, num_rows=num_jobs)
    job_ids = [f"0.acme.apart{number:08d}" for number in range(num_jobs)]
    for events, size in _stages(job_ids):
        _fill(client, _cut(events, size))
    _report(name, "apart", recorder, num_events=3 * num_jobs, num_rows=3 * num_jobs)
    engine.dispose()


def _report(name: str, label: str, recorder: Recorder, *, num_events: int, num_rows: int) -> None:
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    recorder.drain()
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_began_s
    print(
        f"{name:<12}{label:<8}{num_events // 3:>8}{num_events:>9}{took_s:>9.2f}{cpu_s:>8.2f}"
        f"{num_events / took_s:>10.0f}{num_rows / took_s:>9.0f}"
    )


@contextlib.contextmanager
def _postgres_url() -> Generator[str]:
    with postgres_server(is_durable=True) as server:
        yield server.url(server.create_database())


def _databases(which: str) -> Iterator[tuple[str, str]]:
    if which in ("sqlite", "both"):
        with tempfile.TemporaryDirectory() as folder:
            yield "SQLite", f"sqlite:///{folder}/history.db"
    if which in ("postgres", "both") and has_postgres():
        with _postgres_url() as url:
            yield "PostgreSQL", url


def _stages(job_ids: Sequence[str]) -> list[tuple[list[e.Packed], int]]:
    return [
        ([e.submitted(job_id) for job_id in job_ids], SUBMITS_PER_CALL),
        ([e.started(job_id) for job_id in job_ids], STARTS_PER_CALL),
        ([e.ended(job_id) for job_id in job_ids], ENDS_PER_CALL),
    ]


def _together(job_ids: Sequence[str]) -> Iterator[list[e.Packed]]:
    """Write every stage of 256 jobs before the next 256: as if each job ended at once."""
    for begin in range(0, len(job_ids), SUBMITS_PER_CALL):
        for events, size in _stages(job_ids[begin : begin + SUBMITS_PER_CALL]):
            yield from _cut(events, size)


def _cut(events: list[e.Packed], size: int) -> Iterator[list[e.Packed]]:
    for begin in range(0, len(events), size):
        yield events[begin : begin + size]


def _fill(client: Client, entries: Iterator[list[e.Packed]]) -> None:
    with client.pipeline(transaction=False) as pipeline:
        for number, events in enumerate(entries):
            pipeline.xadd(e.KEYS.outbox, {"e": e.pack(events)})
            if number % 500 == 499:
                pipeline.execute()
        pipeline.execute()


if __name__ == "__main__":
    main()
