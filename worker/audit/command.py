"""The command `worker audit`: from a configuration to a report."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from sluice.protocol.redis.urls import redacted
from sluice.worker.audit.auditor import Auditor, AuditReport, AuditTiming, JournalIds
from sluice.worker.audit.history_side import HistorySide, opened_history
from sluice.worker.audit.journal_side import FileJobs, JournalFile
from sluice.worker.audit.lost_jobs import HistoryJobs, LostJobs
from sluice.worker.audit.queue_side import QueueSide
from sluice.worker.audit.repair import Repair
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.clients import Client, connect
from sluice.worker.connection.server_checks import raise_if_refused
from sluice.worker.endpoints import database_url_of, redis_url_of, stated_partitions_of
from sluice.worker.errors import ConfigError, NotReady

DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """Options of the command besides the worker's settings."""

    journal: Path | None = None
    file: Path | None = None
    """The bulk file of the journal."""

    repair: bool = False
    has_history: bool = True
    pause_s: float = 2.0
    history_s: float = 30.0

    def check(self) -> None:
        """Check that the options are consistent.

        Raises:
            ConfigError: they are not.
        """
        if self.file is not None and self.journal is None:
            raise ConfigError(["--file needs --journal: it records how the file's lines became jobs"])
        if self.journal is not None and not self.has_history:
            raise ConfigError(
                ["--journal needs the history: without it, a job that ended long ago looks like a lost one"]
            )
        if self.pause_s < 0 or self.history_s < 0:
            raise ConfigError(["--pause-s and --history-s must be 0 or more seconds"])


def run_audit(config: WorkerConfig, environ: Mapping[str, str], options: AuditOptions) -> AuditReport:
    """Audit a queue, and repair it if requested.

    Raises:
        ConfigError: the settings, the journal or the history's schema are wrong, or the workers serve another number of
            partitions.
        NotReady: Redis or the database does not answer.
    """
    options.check()
    url = redis_url_of(config, environ)
    client = connect(url, timeout_s=config.redis.timeout_s)
    with _history(config, environ, options) as history:
        try:
            return _audited(client, history, config, options)
        except (RedisError, OSError) as error:
            raise_if_refused(error, url)
            raise NotReady(f"redis at {redacted(url)} does not answer: {error}") from error


@contextmanager
def _history(config: WorkerConfig, environ: Mapping[str, str], options: AuditOptions) -> Generator[HistorySide | None]:
    if not options.has_history:
        yield None
        return
    with opened_history(database_url_of(config, environ), config.queue.name) as history:
        yield history


def _audited(client: Client, history: HistorySide | None, config: WorkerConfig, options: AuditOptions) -> AuditReport:
    sides = [QueueSide(client, keys) for keys in stated_partitions_of(client, config)]
    journal = None if options.journal is None else JournalFile.opened(options.journal)
    ids: JournalIds | None = None if journal is None else journal.ids
    report = Auditor(sides, history, ids, _timing(config, options)).audit()
    if options.repair and report.findings:
        sources: list[LostJobs] = [] if history is None else [HistoryJobs(history.engine, config.queue.name)]
        if journal is not None and options.file is not None:
            sources.append(FileJobs(options.file, journal))
        repair = Repair(client, history, sources, report)
        for side in sides:
            repair.repair(side)
        report.notes.append("repaired as listed; run the audit again to check that all sources agree")
    return report


def _timing(config: WorkerConfig, options: AuditOptions) -> AuditTiming:
    days = config.callbacks.retention_days or None
    return AuditTiming(
        pause_s=options.pause_s, history_s=options.history_s, retention_ms=None if days is None else days * DAY_MS
    )
