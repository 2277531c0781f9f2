"""A growth curve: measured points, the fitted exponent, its row in a table, its line in a plot."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks.svg import save_svg

PANELS_PER_ROW = 3
TOLERANCE = 0.15
"""How far a fitted exponent may exceed the expected one: the noise of a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Growth of one cost with one size.

    Sizes grow by factors, so that all decades weigh alike in the fit.
    """

    name: str
    size: str
    """The size, with its unit: the x axis."""

    cost: str
    """The cost, with its unit: the y axis."""

    expected: float
    """Largest exponent allowed: 0 if the cost must not grow with the size, 1 if it may grow linearly."""

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
        """Whether it grows no faster than allowed."""
        return self.exponent <= self.expected + TOLERANCE


def show(curve: Curve) -> None:
    """Print the curve: a heading, then its points."""
    verdict = "" if curve.is_as_expected else "  GROWS FASTER"
    print(
        f"\n{curve.name}: {curve.cost}, exponent {curve.exponent:.2f} (may be {curve.expected:g}){verdict}", flush=True
    )
    print(f"  {curve.size:>24} " + " ".join(f"{size:>9,}" for size, _ in curve.points))
    print(f"  {curve.cost:>24} " + " ".join(f"{_short(cost):>9}" for _, cost in curve.points))


def save(curves: Sequence[Curve], folder: Path) -> None:
    """Write `growth.json`, `growth.png` and `growth.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps(asdict(curve) | {"exponent": round(curve.exponent, 4)}, ensure_ascii=False) for curve in curves]
    (folder / "growth.json").write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    _draw(curves, folder)


def read(path: Path) -> list[Curve]:
    """Return the curves in a `growth.json`."""
    # Any: the file was written by `save`.
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return [Curve(**{name: value for name, value in row.items() if name != "exponent"}) for row in rows]


def _draw(curves: Sequence[Curve], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

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
        panel.set_xticks(sizes, labels=[_tick(size) for size in sizes])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        panel.yaxis.set_major_formatter(lambda value, _: _tick(value))
        panel.minorticks_off()
        panel.tick_params(length=0)
        panel.set_title(curve.name, fontsize=10)
        panel.set_xlabel(curve.size, fontsize=9)
        panel.set_ylabel(curve.cost, fontsize=9)
        panel.legend(fontsize=8, frameon=False)
        panel.grid(visible=True, alpha=0.3)
    for panel in flat[len(curves) :]:
        panel.set_axis_off()
    cast("Any", figure).savefig(folder / "growth.png", dpi=120)  # Any: its types are partial
    save_svg(figure, folder / "growth.svg")
    plt.close(figure)


def _tick(value: float) -> str:
    """Return a short label: 30, 512, 33k, 1M."""
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.0f}{unit}"
    return f"{value:g}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
