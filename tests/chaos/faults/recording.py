"""Bring a history up to date, once, in this process."""

from sluice.history.database import open_database
from sluice.history.writer import HistoryWriter
from sluice.worker.recorder.migrate import prepare
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from tests.servers import RedisServer


def record_all(server: RedisServer, database_url: str) -> None:
    """Write all that the outbox has; the tables are made where there are none."""
    engine = open_database(database_url, is_writer=True)
    prepare(engine)
    with server.client() as client:
        Recorder(client, HistoryWriter(engine), RecorderSettings()).drain()
    engine.dispose()
