"""Format an audit's report as a table and as JSON."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping

from sluice.worker.audit.auditor import AuditReport
from sluice.worker.audit.findings import Finding

STATES = ("done", "failed", "cancelled", "expired", "queued", "running")
SHOWN = 50
"""Maximum number of findings of one kind in the table; `--json` has all."""


def table_of(report: AuditReport) -> str:
    """Format the sums of each source, then each disagreement with what to do."""
    return "\n".join([*_sums(report), "", *_findings(report), *(f"note: {note}" for note in report.notes)])


def _sums(report: AuditReport) -> Iterator[str]:
    yield "  ".join(["source           ", *(f"{name:>10}" for name in ("submitted", *STATES))])
    counters = report.counters
    yield _row("counters", counters["submitted"], counters)
    yield _row("jobs in the queue", None, report.jobs)
    if report.history is not None:
        yield _row("history", sum(report.history.values()), report.history)
    if report.num_journal is not None:
        yield _row("journal", report.num_journal, None)


def _row(source: str, submitted: int | None, states: Mapping[str, int] | None) -> str:
    cells = [submitted, *(None if states is None else states.get(name, 0) for name in STATES)]
    return "  ".join([f"{source:<17}", *(f"{'-' if cell is None else cell:>10}" for cell in cells)])


def _findings(report: AuditReport) -> Iterator[str]:
    if not report.findings:
        yield "All sources agree: submitted = done + failed + cancelled + expired + queued + running."
        return
    total = len(report.findings) + report.num_more
    yield f"{total} disagreement{'s' if total > 1 else ''}, each seen twice:"
    by_kind = Counter(finding.kind for finding in report.findings)
    for kind, count in by_kind.items():
        yield f"\n{kind.replace('_', ' ').upper()} ({count}): {kind.advice}"
        mine = [finding for finding in report.findings if finding.kind == kind]
        yield from (f"  {_line(finding, report)}" for finding in mine[:SHOWN])
        if count > SHOWN:
            yield f"  and {count - SHOWN} more (--json shows all)"


def _line(finding: Finding, report: AuditReport) -> str:
    done = report.done.get(finding.key)
    sides = (("queue", finding.queue), ("history", finding.history), ("journal", finding.journal), ("repair", done))
    return f"{finding.subject:<40} " + "; ".join(f"{side}: {said}" for side, said in sides if said is not None)


def json_of(report: AuditReport) -> str:
    """Format the report as JSON."""
    return json.dumps(
        {
            "agrees": not report.findings,
            "counters": dict(report.counters),
            "jobs_in_queue": dict(report.jobs),
            "history": report.history,
            "journal": report.num_journal,
            "disagreements": [_object(finding, report) for finding in report.findings],
            "beyond": report.num_more,
            "notes": report.notes,
        },
        indent=2,
    )


def _object(finding: Finding, report: AuditReport) -> dict[str, object]:
    return {
        "kind": finding.kind,
        "subject": finding.subject,
        "job_id": finding.job_id,
        "partition": finding.partition,
        "queue": finding.queue,
        "history": finding.history,
        "journal": finding.journal,
        "what_to_do": finding.kind.advice,
        "repair": report.done.get(finding.key),
    }
