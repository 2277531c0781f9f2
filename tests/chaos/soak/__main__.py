"""`make soak`: a long soak with the null model, then one with the real engine. Exit code 1 if anything is wrong.

python -m tests.chaos.soak --jobs 100000 --kills 1000 --real-jobs 2000 --real-kills 60
"""

import argparse
import math
import secrets
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tests.chaos.soak.run import MEAN_S, Report, SoakSettings, run
from tests.end_to_end.processes import ROOT

REAL_MEAN_S = {**MEAN_S, "kill -9 of a worker": 4.0, "restart of Redis, SIGKILL": 90.0}


def main() -> int:
    """Soak, print, and say by the exit code."""
    given = _arguments()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="sluice-soak-"))
    null = SoakSettings(
        seed=given.seed,
        folder=folder / "null",
        jobs=given.jobs,
        kills=given.kills,
        at_most_s=given.minutes * 60,
        jobs_per_s=given.jobs_per_s,
        mean_s={kind: seconds / given.fault_rate for kind, seconds in MEAN_S.items()},
    )
    real = replace(
        null,
        folder=folder / "real",
        name="real engine",
        model=str(ROOT / "worker" / "small_model"),
        # Tokens of float32 are the same in any batch; in bf16 a tie may fall otherwise.
        dtype="float32",
        jobs=given.real_jobs,
        kills=given.real_kills,
        at_most_s=given.real_minutes * 60,
        jobs_per_s=given.real_jobs_per_s,
        catalogue_size=60,
        max_tokens=150,
        num_workers=3,
        mean_s=REAL_MEAN_S,
    )
    # Both run, also where the first has found something.
    went_well = [_ran_well(one, rounds) for one, rounds in ((null, given.rounds), (real, 1)) if one.jobs]
    return 0 if all(went_well) else 1


def _ran_well(settings: SoakSettings, rounds: int) -> bool:
    """In rounds, each with a separate server: a server restarts as fast as its data is read."""
    began_s, total = time.monotonic(), Report()
    for number in range(rounds):
        part = replace(
            settings,
            seed=settings.seed + number,
            folder=settings.folder / str(number),
            jobs=math.ceil((settings.jobs - total.acknowledged) / (rounds - number)),
            kills=math.ceil((settings.kills - total.num_kills) / (rounds - number)),
            at_most_s=settings.at_most_s / rounds,
        )
        report = run(part, _say)
        _say(report.text())
        total.add(report)
    is_enough = total.acknowledged >= settings.jobs and total.num_kills >= settings.kills
    if not is_enough:
        _say(f"time was up before {settings.jobs} jobs and {settings.kills} kills")
    _say(f"soak {settings.name}, {rounds} rounds, {time.monotonic() - began_s:.0f} s in all:\n{total.text()}")
    _say(f"soak {settings.name}: {'sound' if total.is_sound else 'NOT SOUND'}\n")
    return total.is_sound and is_enough


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill everything, again and again; then read the books.")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(10**6), help="of requests and faults; random by default"
    )
    parser.add_argument("--folder", type=Path, help="for logs, journals and history; a fresh one by default")
    parser.add_argument("--jobs", type=int, default=100_000, help="with the null model; 0 leaves it out")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5, help="with the null model, each with a separate server")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    parser.add_argument("--jobs-per-s", type=float, default=150.0)
    parser.add_argument("--fault-rate", type=float, default=1.0, help="with the null model, times as often as usual")
    parser.add_argument("--real-jobs", type=int, default=2000, help="with the real engine; 0 leaves it out")
    parser.add_argument("--real-kills", type=int, default=50)
    parser.add_argument("--real-minutes", type=float, default=20.0)
    parser.add_argument("--real-jobs-per-s", type=float, default=10.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
