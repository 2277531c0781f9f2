"""The command `worker audit`: from a configuration to a report."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sluice.worker.audit.auditor import Auditor, AuditReport
from sluice.worker.audit.history_side import HistorySide, opened_history
from sluice.worker.audit.journal_side import JournalFile, jobs_of_file
from sluice.worker.audit.lost_jobs import LostJobs, jobs_of_history
from sluice.worker.audit.queue_side import QueueSide
from sluice.worker.audit.repair import Repair
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.clients import Client, connect
from sluice.worker.connection.server_checks import expecting_answers
from sluice.worker.endpoints import database_url_of, find_redis, stated_partitions_of
from sluice.worker.errors import ConfigError

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
    queue = config.queue.only("an audit reads")
    url = find_redis(config, environ).url
    client = connect(url, timeout_s=config.redis.timeout_s)
    if not options.has_history:
        with expecting_answers(url):
            return _audited(client, None, config, options)
    with opened_history(database_url_of(config, environ), queue) as history, expecting_answers(url):
        return _audited(client, history, config, options)


def _audited(client: Client, history: HistorySide | None, config: WorkerConfig, options: AuditOptions) -> AuditReport:
    sides = [QueueSide(client, keys) for keys in stated_partitions_of(client, config)]
    journal = None if options.journal is None else JournalFile.opened(options.journal)
    days = config.callbacks.retention_days or None
    report = Auditor(
        sides,
        history,
        None if journal is None else journal.ids,
        pause_s=options.pause_s,
        history_s=options.history_s,
        retention_ms=None if days is None else days * DAY_MS,
    ).audit()
    if options.repair and report.findings:
        sources: list[LostJobs] = (
            [] if history is None else [partial(jobs_of_history, history.engine, config.queue.names[0])]
        )
        if journal is not None and options.file is not None:
            sources.append(partial(jobs_of_file, options.file, journal))
        repair = Repair(client, history, sources, report)
        for side in sides:
            repair.repair(side)
        report.notes.append("repaired as listed; run the audit again to check that all sources agree")
    return report
