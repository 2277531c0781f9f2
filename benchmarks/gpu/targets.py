"""Targets of GPU figures, next to the measured values. Knows no tensors.

A target is met if every matching line of its section meets it; lines without a target are free.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.report import Line, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound on one figure of some lines."""

    what: str
    section: str
    names: str
    """A regular expression for the whole name of a line."""

    figure: str
    bound: float
    is_least: bool = False
    """True: the figure must be at least the bound, else at most."""

    def is_for(self, section: str, line: Line) -> bool:
        """Whether `line` is covered and has the figure."""
        return section == self.section and self.figure in line.figures and bool(re.fullmatch(self.names, line.name))

    def is_reached(self, value: float) -> bool:
        """Whether `value` meets the bound."""
        return value >= self.bound if self.is_least else value <= self.bound

    def worst(self, values: Iterable[float]) -> float:
        """Return the value farthest on the wrong side."""
        return min(values) if self.is_least else max(values)

    def __str__(self) -> str:
        return f"{self.figure} {'>=' if self.is_least else '<='} {self.bound:g}"


def _share_of_copy(what: str, names: str, bound: float) -> Target:
    return Target(what=what, section="timing", names=names, figure="of copy", bound=bound, is_least=True)


_SHAPES = r"(8B|1B|0\.6B)"
TARGETS: Sequence[Target] = (
    _share_of_copy(
        "decode attention, from 8k and batch 32", rf"attention, decode, {_SHAPES}, (32|128) x (8192|32768)", 0.90
    ),
    _share_of_copy("decode attention at 2k, from batch 32", rf"attention, decode, {_SHAPES}, (32|128) x 2048", 0.80),
    Target(
        what="decode attention, mixed lengths",
        section="timing",
        names="attention, decode, mixed lengths, .*",
        figure="times bytes",
        bound=1.2,
    ),
    Target(
        what="prefill attention at 8k",
        section="timing",
        names="attention, prefill of 8192",
        figure="of product",
        bound=0.60,
        is_least=True,
    ),
    _share_of_copy("norm, from 4k tokens", r"(add_)?rms_norm, (4096|16384) x 4096", 0.85),
    _share_of_copy("activation, from 4k tokens", r"gated_activation, 4096 x 14336", 0.85),
    _share_of_copy("KV write, from 4k tokens", r"write_kv( with norm)?, (4096|16384) tokens", 0.85),
    Target(what="sampling, greedy", section="timing", names="sample, greedy, 256 x 128256", figure="us", bound=60),
    Target(what="sampling, top-p", section="timing", names=r"sample, .*top-p.*, 256 x 128256", figure="us", bound=200),
    Target(what="8B decode step, batch 1", section="step", names=r"8B, 1 x \d+", figure="times least", bound=1.25),
    Target(
        what="8B decode step, batch 32 and 256",
        section="step",
        names=r"8B, (32|256) x \d+",
        figure="times least",
        bound=1.33,
    ),
    Target(
        what="compared with generate_batch",
        section="peers",
        names="engine compared with generate_batch, .*",
        figure="times theirs",
        bound=4,
        is_least=True,
    ),
    Target(
        what="cost of deterministic decode steps",
        section="deterministic",
        names=rf"{_SHAPES}, \d+ x \d+",
        figure="cost",
        bound=0.05,
    ),
    Target(what="device idle in a busy steady state", section="split", names=".*", figure="idle", bound=0.03),
    Target(what="cost of the service", section="service", names="saturated service, .*", figure="cost", bound=0.05),
)


def verdicts(report: Report) -> Iterator[Line]:
    """Yield each target as reached, not reached or not measured, with the worst figure and its line."""
    for target in TARGETS:
        found = {
            line.name: float(line.figures[target.figure])
            for line in report.lines.get(target.section, ())
            if target.is_for(target.section, line)
        }
        figures: dict[str, float | str] = {"target": str(target), "verdict": "not measured"}
        if found:
            worst = target.worst(found.values())
            figures["verdict"] = "reached" if target.is_reached(worst) else "NOT reached"
            figures |= {"worst": worst, "at": next(name for name, value in found.items() if value == worst)}
            figures["lines"] = len(found)
        yield Line(target.what, figures)
