"""Costs and gains of each batching discipline: published claims, reproduced on this engine.

    python -m benchmarks disciplines [--case NAME ...] [--out FOLDER] [--size SHARE] [--dtype DTYPE]

Every case sends the same arrivals through the real scheduler and engine under each discipline: `static`, `dynamic`,
`orca`, `slots`, `prefill-first`, `continuous` (`engine.scheduling.disciplines`). All cases but the last two run in
virtual time: a step-time model gives the duration of a step, so a minute of traffic takes a second. `real` runs a
random model of 125 M parameters on this CPU, fits a step time to its steps, and replays the same arrivals in virtual
time. `real-concurrency` runs it with 1 to 256 sequences at once.

Prints a table and the claims of each case; with --out also writes disciplines.json and a PNG and an SVG of each plot.
"""

import argparse
import json
from pathlib import Path

from benchmarks.disciplines.cases import CASES
from benchmarks.disciplines.runs import CaseResult, table_of

REAL = ("real", "real-concurrency")


def main() -> None:
    """Run the selected cases."""
    parser = argparse.ArgumentParser(description="Compare ways of batching.")
    parser.add_argument("--case", action="append", choices=[*CASES, *REAL], help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write disciplines.json and the plots here")
    parser.add_argument("--size", type=float, default=1.0, metavar="SHARE", help="share of the requests to send")
    parser.add_argument("--dtype", default="bfloat16", help="of the real model; float32 where bfloat16 has no kernels")
    asked = parser.parse_args()
    results = run(asked.case or [*CASES, *REAL], asked.size, asked.dtype)
    if asked.out is not None:
        write(results, asked.out)


def run(names: list[str], size: float, dtype: str = "bfloat16") -> list[CaseResult]:
    """Run cases, and print each as soon as it is there."""
    results: list[CaseResult] = []
    for name in names:
        results.append(_run_real(name, size, dtype) if name in REAL else CASES[name](size))
        print_case(results[-1])
    return results


def _run_real(name: str, size: float, dtype: str) -> CaseResult:
    # Seconds to import torch, which the other cases do without.
    from benchmarks.disciplines.real import on_this_cpu, sequences_on_this_cpu

    return (on_this_cpu if name == "real" else sequences_on_this_cpu)(size, dtype)


def print_case(result: CaseResult) -> None:
    """A case's table, claims and notes."""
    print(f"\n== {result.name}: {result.setting}", flush=True)
    if result.rows:
        print(table_of(result.rows))
    for claim in result.claims:
        print(f"{claim.what}: published {claim.published}; predicted {claim.predicted}; measured {claim.measured}")
    for note in result.notes:
        print(note)


def write(results: list[CaseResult], folder: Path) -> None:
    """Write what machines and people look at later."""
    # Only where plots are asked for: it is no dependency of the rest.
    from benchmarks.disciplines.plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    tree = {result.name: result.as_json() for result in results}
    (folder / "disciplines.json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    for result in results:
        draw(result, folder)


if __name__ == "__main__":
    main()
