"""The verdict on a run: the checker's findings, and for each loss the fault that may explain it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import sqlalchemy as sa

from tests.chaos.checker.audit import check
from tests.chaos.checker.evidence import Journal, read_journals, read_reference
from tests.chaos.network.observing import longest_pause_s
from tests.chaos.network.report import LEVELS, Report, Row
from tests.chaos.network.site import Site

GATEWAY = "gateway"
OF_THE_HISTORY = ("row", "attempts")
"""Kinds of findings about the history, which keeps what the old primary said."""

LAG_S = 1.0
"""What a primary acknowledges at `memory` reaches a replica that follows well within this."""

_TIMES = sa.text(
    "SELECT submitted_ms, finished_ms FROM jobs WHERE id = :job_id"
    " UNION ALL SELECT started_ms, ended_ms FROM attempts WHERE job_id = :job_id"
)
_TAKEN_OVER = sa.text(
    "SELECT next.started_ms, greatest(mine.started_ms, CAST(:began_ms AS bigint)) FROM attempts mine"
    " JOIN attempts next ON next.job_id = mine.job_id AND next.epoch = mine.epoch + 1"
    " WHERE mine.why IN ('death', 'suspect') AND next.started_ms BETWEEN :began_ms AND :until_ms"
)


def journal_of(folder: Path, name: str) -> Path:
    """The journal of the producer at a level, or of that of the gateway."""
    return folder / f"journal-{name}.jsonl"


def notes_of(folder: Path) -> Path:
    """What the gateway's reader read otherwise than undisturbed."""
    return folder / "differences.txt"


def judge(place: Site, report: Report) -> None:
    """Check what the queue kept, once it is drained, and complete the report."""
    journals = {name: read_journals([journal_of(place.folder, name)]) for name in (*LEVELS, GATEWAY)}
    whole: Journal = {job_id: asked for journal in journals.values() for job_id, asked in journal.items()}
    reference = read_reference(place.folder / "reference.json")
    with place.primary_client() as client:
        found = check(client, whole, reference, database_url=place.local_database_url)
    report.acknowledged = {
        name: sum(one.is_acknowledged for one in journal.values()) for name, journal in journals.items()
    }
    report.checker = ", ".join(f"{name} {number}" for name, number in found.figures.items())
    acknowledged_s = _times_acknowledged(place.folder)
    engine = sa.create_engine(place.local_database_url)
    with engine.connect() as connection:
        judgement = _Judgement(report, connection, acknowledged_s)
        for job_id, what in found.found:
            judgement.sort(job_id, what, "memory" if job_id in journals["memory"] else LEVELS[1])
        for row in report.rows:
            row.submit_pause_s = longest_pause_s(sorted(acknowledged_s.values()), row.began_s, row.ended_s)
            row.takeovers_s = _takeovers_s(connection, row)
    engine.dispose()
    if notes_of(place.folder).exists():
        report.findings += [f"a reader: {line}" for line in notes_of(place.folder).read_text().splitlines()]


class _Judgement:
    """Sorts findings: what asynchronous replication loses by a failover, and what is wrong."""

    def __init__(self, report: Report, connection: sa.Connection, acknowledged_s: Mapping[str, float]) -> None:
        self._report = report
        self._connection = connection
        self._acknowledged_s = acknowledged_s

    def sort(self, job_id: str, what: str, level: str) -> None:
        """Count a finding with the failover that explains it, or report it."""
        kind, row, is_allowed = what.partition(":")[0], None, False
        if kind == "lost":
            row = _row_at(self._report.rows, self._acknowledged_s.get(job_id, 0.0))
            is_allowed = row is not None and row.failover_s is not None and level == "memory"
            if row is not None:
                row.lost[level] += 1
        elif kind in OF_THE_HISTORY:
            row = self._failover_amid(job_id)
            is_allowed = row is not None
            if row is not None:
                row.undone.add(job_id)
        if not is_allowed:
            self._report.findings.append(f"{job_id} ({level}, {row.what if row else 'no fault'}): {what}")

    def _failover_amid(self, job_id: str) -> Row | None:
        """The fault with a failover during which the history has something of a job: it may have both servers' word."""
        times_ms = [time_ms for row in self._connection.execute(_TIMES, {"job_id": job_id}) for time_ms in row]
        failovers = [row for row in self._report.rows if row.failover_s is not None]
        amid = (row for row in failovers for time_ms in times_ms if row.began_ms <= (time_ms or 0) <= row.ended_ms)
        return next(amid, None)


def _row_at(rows: Sequence[Row], at_s: float) -> Row | None:
    return next((row for row in rows if row.began_s - LAG_S <= at_s <= row.ended_s), None)


def _takeovers_s(connection: sa.Connection, row: Row) -> list[float]:
    """Of each job whose owner counts as dead: seconds from the fault's begin, or its lease, to the next lease."""
    leases = connection.execute(_TAKEN_OVER, {"began_ms": row.began_ms, "until_ms": row.ended_ms})
    return [(next_ms - from_ms) / 1000 for next_ms, from_ms in leases]


def _times_acknowledged(folder: Path) -> dict[str, float]:
    """When each job was acknowledged, by the monotonic clock."""
    texts = [file.read_text() for file in folder.glob("journal-*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return {line["acknowledged"]: line["at_s"] for line in lines if "acknowledged" in line}
