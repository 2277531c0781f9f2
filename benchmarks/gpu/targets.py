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


_SHAPES = r"(8B|1B|0\.6B)"
_DECODE = f"attention, decode, {_SHAPES},"
TARGETS: Sequence[Target] = tuple(
    Target(what=what, section=section, names=names, figure=figure, bound=bound, is_least=sign == ">=")
    for what, section, names, figure, sign, bound in (
        (
            "decode attention, from 8k and batch 32",
            "timing",
            rf"{_DECODE} (32|128) x (8192|32768)",
            "of copy",
            ">=",
            0.90,
        ),
        ("decode attention at 2k, from batch 32", "timing", rf"{_DECODE} (32|128) x 2048", "of copy", ">=", 0.80),
        ("decode attention, mixed lengths", "timing", "attention, decode, mixed lengths, .*", "times bytes", "<=", 1.2),
        ("prefill attention at 8k", "timing", "attention, prefill of 8192", "of product", ">=", 0.60),
        ("norm, from 4k tokens", "timing", r"(add_)?rms_norm, (4096|16384) x 4096", "of copy", ">=", 0.85),
        ("activation, from 4k tokens", "timing", "gated_activation, 4096 x 14336", "of copy", ">=", 0.85),
        ("KV write, from 4k tokens", "timing", r"write_kv( with norm)?, (4096|16384) tokens", "of copy", ">=", 0.85),
        ("sampling, greedy", "timing", "sample, greedy, 256 x 128256", "us", "<=", 60),
        ("sampling, top-p", "timing", "sample, .*top-p.*, 256 x 128256", "us", "<=", 200),
        ("8B decode step, batch 1", "step", r"8B, 1 x \d+", "times least", "<=", 1.25),
        ("8B decode step, batch 32 and 256", "step", r"8B, (32|256) x \d+", "times least", "<=", 1.33),
        ("a row over packed weights, 8B", "timing", r"packed product, 8B .*, 1 rows", "times as fast", ">=", 1.7),
        ("256 rows in fp8, 8B", "timing", r"packed product, 8B .*, fp8 .*, 256 rows", "times as fast", ">=", 1.3),
        ("compared with generate_batch", "peers", "engine compared with generate_batch, .*", "times theirs", ">=", 4),
        ("cost of deterministic decode steps", "deterministic", rf"{_SHAPES}, \d+ x \d+", "cost", "<=", 0.05),
        ("device idle in a busy steady state", "split", ".*", "idle", "<=", 0.03),
        ("cost of the service", "service", "saturated service, .*", "cost", "<=", 0.05),
    )
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
