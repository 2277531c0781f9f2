"""`worker audit`: from a configuration to a report."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from producer.config import redacted
from worker.audit.auditor import Auditor, JournalIds, Patience, Report
from worker.audit.history_side import HistorySide, opened_history
from worker.audit.journal_side import FileJobs, JournalFile
from worker.audit.lost_jobs import HistoryJobs, LostJobs
from worker.audit.queue_side import QueueSide
from worker.audit.repair import Repair
from worker.config import WorkerConfig
from worker.connections import Client, connect
from worker.errors import ConfigError, NotReady
from worker.places import database_url_of, partitions_of, redis_url_of
from worker.server import raise_if_refused

DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line asks for beside the settings."""

    journal: Path | None = None
    file: Path | None = None
    """The bulk file that the journal is of."""

    repair: bool = False
    has_history: bool = True
    pause_s: float = 2.0
    history_s: float = 30.0

    def check(self) -> None:
        """Make sure that these go together.

        Raises:
            ConfigError: they do not.
        """
        if self.file is not None and self.journal is None:
            raise ConfigError(["--file needs --journal: it says how the file's lines became jobs"])
        if self.journal is not None and not self.has_history:
            raise ConfigError(
                ["--journal needs the history: without it, a job that ended long ago looks like a lost one"]
            )
        if self.pause_s < 0 or self.history_s < 0:
            raise ConfigError(["--pause-s and --history-s must be 0 or more seconds"])


def run_audit(config: WorkerConfig, environ: Mapping[str, str], asked: Asked) -> Report:
    """Audit a queue, and mend it where that is asked for.

    Raises:
        ConfigError: the settings, the journal or the history's schema are wrong.
        NotReady: Redis or the database does not answer.
    """
    asked.check()
    url = redis_url_of(config, environ)
    client = connect(url, timeout_s=config.redis.timeout_s)
    with _history(config, environ, asked) as history:
        try:
            return _audited(client, history, config, asked)
        except (RedisError, OSError) as error:
            raise_if_refused(error, url)
            raise NotReady(f"redis at {redacted(url)} does not answer: {error}") from error


@contextmanager
def _history(config: WorkerConfig, environ: Mapping[str, str], asked: Asked) -> Generator[HistorySide | None]:
    if not asked.has_history:
        yield None
        return
    with opened_history(database_url_of(config, environ), config.queue.name) as history:
        yield history


def _audited(client: Client, history: HistorySide | None, config: WorkerConfig, asked: Asked) -> Report:
    sides = [QueueSide(client, keys) for keys in partitions_of(config)]
    journal = None if asked.journal is None else JournalFile.opened(asked.journal)
    ids: JournalIds | None = None if journal is None else journal.ids
    report = Auditor(sides, history, ids, _patience(config, asked)).audit()
    if journal is not None and journal.num_nameless:
        report.notes.append(f"{journal.num_nameless} lines of the journal name no tenant (an older release wrote them)")
    if asked.repair and report.findings:
        sources: list[LostJobs] = [] if history is None else [HistoryJobs(history.engine, config.queue.name)]
        if journal is not None and asked.file is not None:
            sources.append(FileJobs(asked.file, journal))
        repair = Repair(client, history, sources, report)
        for side in sides:
            repair.mend(side)
        report.notes.append("repaired where said; run the audit again to see that all agrees")
    return report


def _patience(config: WorkerConfig, asked: Asked) -> Patience:
    days = config.callbacks.retention_days
    return Patience(
        pause_s=asked.pause_s, history_s=asked.history_s, retention_ms=None if days is None else days * DAY_MS
    )
