"""`python -m tests.chaos.checker`: check a drained queue, job by job. Exit code 1 if there are findings.

    python -m tests.chaos.checker --redis-url unix:///run/q.sock --database-url sqlite:///history.db \\
        --journal producer-0.jsonl --journal producer-1.jsonl --reference undisturbed.json
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import redis

from tests.chaos.checker.audit import Findings, check
from tests.chaos.checker.deliveries import read_deliveries
from tests.chaos.checker.evidence import read_journals, read_reference

SHOWN = 50


def main() -> int:
    """Check the queue, print the findings, and return the exit code."""
    given = _arguments()
    client = cast("Any", redis.Redis).from_url(given.redis_url)  # redis-py types it in part
    evidence = read_journals(given.journal), read_reference(given.reference)
    findings = check(
        client,
        *evidence,
        queue=given.queue,
        partitions=given.partitions,
        database_url=given.database_url,
        deliveries=read_deliveries(given.deliveries, given.secret) if given.deliveries else None,
    )
    sys.stdout.write(report(findings))
    return 1 if findings.found else 0


def report(findings: Findings) -> str:
    """Return a readable report: figures, then each finding with its job."""
    lines = [", ".join(f"{name} {number}" for name, number in findings.figures.items())]
    lines += [f"{name}: {what}" for name, what in findings.found[:SHOWN]]
    if more := len(findings.found) - SHOWN:
        lines += [f"… and {more} more"] if more > 0 else []
    kinds = Counter(what.partition(":")[0] for _, what in findings.found)
    lines += [f"{number} x {kind}" for kind, number in kinds.most_common()]
    lines.append(f"{len(findings.found)} findings" if findings.found else "nothing is wrong")
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check a drained queue against what its producers were promised.")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--queue", default="default")
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--database-url", help="SQLAlchemy URL of the history; without one, rows are not checked")
    parser.add_argument("--journal", type=Path, action="append", required=True, help="what a producer was promised")
    parser.add_argument("--reference", type=Path, required=True, help="what an undisturbed run said")
    parser.add_argument("--deliveries", type=Path, help="a receiver's notes; without them, callbacks are not checked")
    parser.add_argument("--secret", help="with which callbacks are to be signed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
