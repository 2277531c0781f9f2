"""`make fuzz-hostile`: ten minutes of a hostile user. Exit code 1 if others lose, wait too long, or get twice.

python -m tests.fuzz.hostile [--minutes 10] [--seed N] [--server valkey|redis-7.0] [--folder FOLDER]
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.fuzz.hostile.run import Settings, run


def main() -> int:
    """Run, print, and say by the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.hostile", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of all that is drawn")
    parser.add_argument("--server", choices=("valkey", "redis-7.0"), default="valkey")
    parser.add_argument("--folder", type=Path, help="for logs and history; a fresh one by default")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="sluice-hostile-"))
    sys.stdout.write(f"seed {given.seed}, logs in {folder}\n")
    sys.stdout.flush()
    report = run(Settings(seed=given.seed, folder=folder, seconds=given.minutes * 60, flavor=given.server))
    sys.stdout.write(f"{report.text()}\n")
    return 1 if report.all_faults else 0


if __name__ == "__main__":
    sys.exit(main())
