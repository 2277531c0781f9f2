"""What a run found: a row for each fault, and the table for people."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

LEVELS = ("memory", "replica:1")
HEAD = (
    "what was cut", "times", "s", "packets dropped", "failovers: after s", "no job ended for, s",
    "no submit acknowledged for, s", "well again after, s", "jobs taken over: p50, longest s",
    *(f"lost at {level}" for level in LEVELS), "jobs undone in part",
)  # fmt: skip
SHOWN = 40


@dataclass(slots=True, eq=False)
class Row:
    """One fault, and what came of it. Changes until the run's end."""

    kind: str
    what: str
    seconds: float
    began_s: float = 0.0
    began_ms: int = 0
    ended_s: float = 0.0
    """When all was well again."""

    num_dropped: int = 0
    well_s: float = 0.0
    failover_s: float | None = None
    pause_s: float = 0.0
    """The longest time in which no job ended."""

    submit_pause_s: float = 0.0
    """The longest time in which no submit was acknowledged."""

    takeovers_s: list[float] = field(default_factory=list[float])
    lost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0))
    undone: set[str] = field(default_factory=set[str])
    """Jobs of whose course the old primary alone had a part: the history has it, and the queue another."""

    @property
    def ended_ms(self) -> int:
        """When all was well again, by the wall clock."""
        return self.began_ms + round((self.ended_s - self.began_s) * 1000)


@dataclass(slots=True, eq=False)
class Report:
    """All faults of a run, and what the checker found."""

    name: str
    seed: int
    rows: list[Row]
    acknowledged: dict[str, int] = field(default_factory=dict[str, int])
    checker: str = ""
    findings: list[str] = field(default_factory=list[str])
    """All but the losses that the durability page states."""

    def lines(self) -> Iterator[str]:
        """A report for people: the table by kind, and each finding."""
        yield f"{self.name}, seed {self.seed}: {self.checker}"
        yield "acknowledged: " + ", ".join(f"{number} ({name})" for name, number in self.acknowledged.items())
        yield _line(HEAD)
        yield _line(["---"] * len(HEAD))
        for kind in sorted({row.kind for row in self.rows}):
            yield _line(_cells(kind, [row for row in self.rows if row.kind == kind]))
        yield from self.findings[:SHOWN]
        yield f"{len(self.findings)} findings" if self.findings else "nothing is wrong"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(kind: str, rows: Sequence[Row]) -> list[str]:
    failovers = sorted(row.failover_s for row in rows if row.failover_s is not None)
    takeovers = sorted(seconds for row in rows for seconds in row.takeovers_s)
    return [
        kind,
        str(len(rows)),
        _range([row.seconds for row in rows], "g"),
        _range([row.num_dropped for row in rows], "d"),
        f"{len(failovers)}: {_range(failovers, '.1f')}" if failovers else "0",
        f"{max(row.pause_s for row in rows):.1f}",
        f"{max(row.submit_pause_s for row in rows):.1f}",
        f"{max(row.well_s for row in rows):.1f}",
        f"{len(takeovers)}: {takeovers[len(takeovers) // 2]:.1f}, {takeovers[-1]:.1f}" if takeovers else "0",
        *(str(sum(row.lost[level] for row in rows)) for level in LEVELS),
        str(sum(len(row.undone) for row in rows)),
    ]


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(one, form) for one in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
