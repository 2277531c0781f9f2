"""Costs and gains of each batching discipline: published claims, reproduced on this engine.

    python -m benchmarks disciplines [--case NAME ...] [--size SHARE]

Every case sends the same arrivals through the real scheduler and engine under each discipline: `static`, `dynamic`,
`orca`, `slots`, `prefill-first`, `continuous` (`engine.scheduling.disciplines`). Cases run in virtual time: a step-time
model gives the duration of a step, so a minute of traffic takes a second. Prints a table and the claims of each case.
"""

import argparse

from benchmarks.disciplines.cases import CASES
from benchmarks.disciplines.runs import CaseResult, table_of


def main() -> None:
    """Run the selected cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this one; may be repeated")
    parser.add_argument("--size", type=float, default=1.0, metavar="SHARE", help="share of the requests to send")
    given = parser.parse_args()
    for name in given.case or CASES:
        print_case(CASES[name](given.size))


def print_case(result: CaseResult) -> None:
    """Print a case's table and claims."""
    print(f"\n== {result.name}: {result.setting}", flush=True)
    if result.rows:
        print(table_of(result.rows))
    for claim in result.claims:
        print(f"{claim.what}: published {claim.published}; predicted {claim.predicted}; measured {claim.measured}")


if __name__ == "__main__":
    main()
