"""A curve of growth: measured points, the exponent that fits them, its row in a table, its line in a plot."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

PANELS_PER_ROW = 3
TOLERANCE = 0.15
"""How far a fitted exponent may lie above the expected one: what a busy machine moves it by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """How one cost moves with one size.

    Points lie over sizes that grow by factors, so that all decades weigh alike in the fit.
    """

    name: str
    size: str
    """What grows: the unit of the x axis."""

    cost: str
    """What is paid, with its unit: the y axis."""

    expected: float
    """The exponent that it may have: 0 where the cost must not move with the size, 1 where it must grow in step."""

    points: Sequence[tuple[int, float]]

    @property
    def exponent(self) -> float:
        """The slope of log(cost) over log(size), by least squares: cost ~ size ** exponent."""
        xs = [math.log(size) for size, _ in self.points]
        ys = [math.log(cost) for _, cost in self.points]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        spread = sum((x - mean_x) ** 2 for x in xs)
        return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread

    @property
    def is_as_expected(self) -> bool:
        """Whether it grows no faster than it may."""
        return self.exponent <= self.expected + TOLERANCE


def show(curve: Curve) -> None:
    """Print the curve: a line of its own, then its points."""
    verdict = "" if curve.is_as_expected else "  GROWS FASTER"
    print(
        f"\n{curve.name}: {curve.cost}, exponent {curve.exponent:.2f} (may be {curve.expected:g}){verdict}", flush=True
    )
    print(f"  {curve.size:>24} " + " ".join(f"{size:>9,}" for size, _ in curve.points))
    print(f"  {curve.cost:>24} " + " ".join(f"{_short(cost):>9}" for _, cost in curve.points))


def save(curves: Sequence[Curve], folder: Path) -> None:
    """Write `growth.json`, `growth.png` and `growth.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(curve) | {"exponent": curve.exponent} for curve in curves]
    (folder / "growth.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    _draw(curves, folder)


def _draw(curves: Sequence[Curve], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    num_rows = -(-len(curves) // PANELS_PER_ROW)
    figure, panels = plt.subplots(
        num_rows, PANELS_PER_ROW, figsize=(4 * PANELS_PER_ROW, 3 * num_rows), squeeze=False, layout="constrained"
    )
    flat = [panel for row in panels for panel in row]
    for panel, curve in zip(flat, curves, strict=False):
        sizes, costs = zip(*curve.points, strict=True)
        panel.loglog(sizes, costs, "o-", color="#0072B2", label=f"measured: exponent {curve.exponent:.2f}")
        allowed = [costs[0] * (size / sizes[0]) ** curve.expected for size in sizes]
        panel.loglog(sizes, allowed, "--", color="#767676", label=f"may be {curve.expected:g}")
        panel.set_ylim(min(*costs, *allowed) / 3, max(*costs, *allowed) * 3)
        panel.set_title(curve.name, fontsize=10)
        panel.set_xlabel(curve.size, fontsize=9)
        panel.set_ylabel(curve.cost, fontsize=9)
        panel.legend(fontsize=8, frameon=False)
        panel.grid(visible=True, alpha=0.3)
    for panel in flat[len(curves) :]:
        panel.set_axis_off()
    for ending in ("png", "svg"):
        cast("Any", figure).savefig(folder / f"growth.{ending}", dpi=120)  # Any: its types are partial
    plt.close(figure)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
