"""`make test-network`: cut and worsen each link in turn, and print what was lost. Exit code 1 if anything is wrong.

python -m tests.chaos.network --seed 7 --groups pairs splits
"""

import argparse
import os
import secrets
import sys
import tempfile
from pathlib import Path

from tests.chaos.network.faults import GROUPS, drawn
from tests.chaos.network.hosts import why_not
from tests.chaos.network.run import Run
from tests.conftest import MEMORY


def main() -> int:
    """Run each group of faults on a site of its own, print its table, and return the exit code."""
    given = _arguments()
    if (reason := why_not()) is not None:
        sys.stderr.write(f"the network suite {reason}\n")
        return 2
    num_findings = 0
    for name in given.groups:
        faults = drawn(name, given.seed, given.faults)
        folder = Path(tempfile.mkdtemp(prefix="sluice-", dir=_memory()))
        _say(f"{name}: seed {given.seed}, {len(faults)} faults, logs and journals in {folder}")
        report = Run(name, given.seed, faults, folder, _say).run()
        _say("\n".join(report.lines()))
        num_findings += len(report.findings)
    return 1 if num_findings else 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _memory() -> Path | None:
    """Where a disk that stalls makes no server silent."""
    return MEMORY if MEMORY.is_dir() and "TMPDIR" not in os.environ else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cut and worsen the links between hosts; then read the books.")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of jobs, faults and their times")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--faults", type=int, help="draw so many of each group; all by default")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
