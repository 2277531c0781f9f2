"""For tests of the audit: a queue and its history, audits of them, and hands that break things."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.history.tables import jobs
from sluice.history.writer import HistoryWriter
from sluice.protocol.wire import JobId
from sluice.worker.audit.auditor import AuditReport
from sluice.worker.audit.command import AuditOptions, run_audit
from sluice.worker.config import load_config
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from tests.protocol.driving import Queue
from tests.servers import RedisServer


@dataclass(slots=True, eq=False)
class Scene:
    """A queue on a server, and its history."""

    server: RedisServer
    queue: Queue
    history: Engine
    partitions: int = 1
    is_told: bool = True
    """Whether the audit is given the number of partitions."""

    def record(self) -> None:
        """Write what the outbox holds."""
        settings = RecorderSettings(queues=(self.queue.keys.queue,), name="r1", partitions=self.partitions)
        Recorder(self.queue.client, HistoryWriter(self.history), settings).drain()

    def audit(
        self,
        *,
        repair: bool = False,
        retention_days: float = 0,
        **asked: Any,  # Any: fields of AuditOptions
    ) -> AuditReport:
        """One audit, without patience."""
        url = self.history.url.render_as_string(hide_password=False)
        flags: dict[str, object] = {
            "redis.url": self.server.url,
            "history.database_url": url,
            "queue.name": self.queue.keys.queue,
        }
        if self.is_told:
            flags["queue.partitions"] = self.partitions
        flags["callbacks.retention_days"] = retention_days
        known: dict[str, Any] = {"pause_s": 0.0, "history_s": 0.0, "repair": repair}
        return run_audit(load_config({}, flags=flags), {}, AuditOptions(**(known | asked)))

    def found(self, **asked: Any) -> Counter[tuple[str, str]]:  # Any: as above
        """Kind and subject of each disagreement."""
        return Counter((str(one.kind), one.subject) for one in self.audit(**asked).findings)

    def repair(self, **asked: Any) -> dict[tuple[str, str], str]:  # Any: as above
        """Repair, and return what was done."""
        return self.audit(repair=True, **asked).done

    def state_in_history(self, job_id: JobId) -> str | None:
        """Of a job's row."""
        with self.history.connect() as connection:
            return connection.execute(sa.select(jobs.c.state).where(jobs.c.id == job_id)).scalar_one_or_none()

    def change_history(self, job_id: JobId, **values: object) -> None:
        """Break a row by hand."""
        with self.history.begin() as connection:
            connection.execute(jobs.update().where(jobs.c.id == job_id).values(**values))

    def forget_in_history(self, job_id: JobId) -> None:
        """Lose a row."""
        with self.history.begin() as connection:
            connection.execute(jobs.delete().where(jobs.c.id == job_id))
