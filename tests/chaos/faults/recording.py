"""Bring a history up to date, once, in this process."""

from sluice.producer.contract.database import open_database
from sluice.worker.history.migrate import prepare
from sluice.worker.history.recorder import Recorder, RecorderSettings
from sluice.worker.history.writer import HistoryWriter
from tests.servers import RedisServer


def record_all(server: RedisServer, database_url: str) -> None:
    """Write all that the outbox has; the tables are made where there are none."""
    engine = open_database(database_url, is_writer=True)
    prepare(engine)
    with server.client() as client:
        Recorder(client, HistoryWriter(engine), RecorderSettings()).drain()
    engine.dispose()
