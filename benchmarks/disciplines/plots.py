"""Plots of `benchmarks disciplines` as PNG and SVG, distinguishable without colour by markers and dashes."""

# matplotlib's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.disciplines.runs import CaseResult
from benchmarks.svg import save_svg

# Okabe and Ito's colours, distinguishable with any kind of colour vision; with a marker and a dash each.
_STYLES = {
    "continuous": ("#000000", "o", "-"),
    "prefill-first": ("#D55E00", "s", "--"),
    "slots": ("#0072B2", "^", "-."),
    "orca": ("#009E73", "D", ":"),
    "dynamic": ("#CC79A7", "v", "--"),
    "static": ("#E69F00", "X", "-"),
    "both kinds on each": ("#000000", "o", "-"),
    "prompts | decodes": ("#0072B2", "^", "--"),
}


def draw(result: CaseResult, folder: Path) -> None:
    """Draw a case if it has a plot."""
    plot = _PLOTS.get(result.name)
    if plot is None:
        return
    with mpl.rc_context({"font.size": 10}):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        plot(figure.add_subplot(), result)
        figure.savefig(folder / f"{result.name}.png", dpi=120)
        save_svg(figure, folder / f"{result.name}.svg")


def _goodput(axes: Axes, result: CaseResult) -> None:
    _lines(axes, result)
    most = max(rate for curve in result.curves for rate, _ in curve.points)
    axes.plot([0, most], [0, most], color="#999999", linewidth=0.8, zorder=0)
    axes.text(most * 0.8, most * 0.86, "all of them", color="#666666", ha="right")
    axes.set(xlabel="requests a second that come", ylabel="that meet TTFT and TPOT", xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False)


def _gaps(axes: Axes, result: CaseResult) -> None:
    for curve in result.curves:
        colour, _, dash = _STYLES[curve.label]
        axes.plot(*zip(*curve.points, strict=True), color=colour, linestyle=dash, linewidth=1.8, label=curve.label)
    axes.set(xscale="log", yscale="log", xlabel="time between two tokens, ms", ylabel="share of gaps at least as long")
    axes.grid(which="major", color="#DDDDDD", linewidth=0.6)
    axes.legend(frameon=False)


def _bars(axes: Axes, result: CaseResult) -> None:
    rows = result.rows[::-1]
    rates = [one.figures.output_tokens_per_s for one in rows]
    axes.barh([one.label for one in rows], rates, color="#0072B2")
    for index, one in enumerate(rows):
        text = f" {rates[index]:,.0f}   ({one.figures.kv_waste:.0%} of the slots held are empty)"
        axes.text(rates[index], index, text, va="center")
    axes.set(xlabel="output tokens a second, with the same memory", xlim=(0, max(rates) * 2.05))
    axes.spines[["top", "right"]].set_visible(False)


def _knee(axes: Axes, result: CaseResult) -> None:
    counts, rates = zip(*result.curves[0].points, strict=True)
    tpots_ms = [one.figures.tpot_mean_s * 1e3 for one in result.rows]
    axes.plot(counts, rates, color="#000000", marker="o", markersize=5)
    axes.plot(counts, [rates[0] * count for count in counts], color="#999999", linewidth=0.8, zorder=0)
    for count, rate, tpot_ms in zip(counts, rates, tpots_ms, strict=True):
        axes.annotate(f"{tpot_ms:.1f} ms", (count, rate), textcoords="offset points", xytext=(6, -12))
    axes.set(xscale="log", yscale="log", xlabel="sequences at once (beside each point: time per output token)")
    axes.set(ylabel="output tokens a second", xticks=counts, xticklabels=[f"{count:.0f}" for count in counts])
    axes.set(xlim=(0.8, 480), ylim=(min(rates) * 0.7, max(rates) * 2))
    axes.minorticks_off()
    axes.grid(color="#DDDDDD", linewidth=0.6)


def _lines(axes: Axes, result: CaseResult) -> None:
    for curve in result.curves:
        colour, marker, dash = _STYLES[curve.label]
        points = zip(*curve.points, strict=True)
        axes.plot(*points, color=colour, marker=marker, linestyle=dash, markersize=5, label=curve.label)
    axes.grid(color="#DDDDDD", linewidth=0.6)


_PLOTS: dict[str, Callable[[Axes, CaseResult], None]] = {
    "goodput": _goodput,
    "split": _goodput,
    "long-prompts": _gaps,
    "memory": _bars,
    "concurrency": _knee,
}
