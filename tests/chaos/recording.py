"""Bring a history up to date, once, in this process."""

from producer.contract.database import open_database
from tests.servers import RedisServer
from worker.history.writer import HistoryWriter
from worker.migrate import prepare
from worker.recorder import Recorder, RecorderSettings


def record_all(server: RedisServer, database_url: str) -> None:
    """Write all that the outbox has; the tables are made where there are none."""
    engine = open_database(database_url, is_writer=True)
    prepare(engine)
    with server.client() as client:
        Recorder(client, HistoryWriter(engine), RecorderSettings()).drain()
    engine.dispose()
