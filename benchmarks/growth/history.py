"""Growth curves of the history: the recorder's cost per row, and a reader's cost per page, with the number of rows."""

import tempfile
import time
from collections.abc import Sequence

from benchmarks.growth.curves import Curve
from benchmarks.queue.history import fill
from sluice.producer.contract.database import open_database
from sluice.producer.history.queries import History, JobFilter
from sluice.worker.connection.clients import connect
from sluice.worker.history.migrate import migrate
from sluice.worker.history.recorder import Recorder, RecorderSettings
from sluice.worker.history.writer import HistoryWriter
from tests.servers import redis_server
from tests.worker.history import events as e

NUM_MEASURED = 4096
NUM_PAGES = 20


def by_rows(sizes: Sequence[int]) -> list[Curve]:
    """Measure the whole recorder, outbox to SQLite, and the page of the newest jobs."""
    record: list[tuple[int, float]] = []
    page: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder, redis_server() as server:
        url = f"sqlite:///{folder}/history.db"
        engine, client = open_database(url, is_writer=True), connect(server.url, timeout_s=60)
        migrate(engine)
        recorder = Recorder(client, HistoryWriter(engine), RecorderSettings(queue=e.QUEUE, name="bench"))
        num_rows = 0
        for size in sizes:
            fill(engine, num_rows, size)
            num_rows = size
            job_ids = [f"0.acme.grow{size}-{number:06d}" for number in range(NUM_MEASURED)]
            for begin in range(0, NUM_MEASURED, 256):
                events = [e.submitted(job_id) for job_id in job_ids[begin : begin + 256]]
                client.xadd(e.KEYS.outbox, {"e": e.pack(events)})
            began_s = time.process_time()
            recorder.drain()
            record.append((size, 1e6 * (time.process_time() - began_s) / NUM_MEASURED))
            page.append((size, _page_ms(url)))
        engine.dispose()
    size_name = "rows in the history"
    return [
        Curve(name="record, SQLite", size=size_name, cost="CPU µs a row", expected=0.0, points=record),
        Curve(name="page of newest jobs, SQLite", size=size_name, cost="CPU ms", expected=0.0, points=page),
    ]


def _page_ms(url: str) -> float:
    with History(url) as history:
        began_s = time.process_time()
        for _ in range(NUM_PAGES):
            history.jobs(JobFilter(queue="chat"), limit=50)
        return 1e3 * (time.process_time() - began_s) / NUM_PAGES
