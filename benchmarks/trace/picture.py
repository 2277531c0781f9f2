"""A picture of a few steps of a trace: queue, host and device over time, as an SVG."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from benchmarks.trace.marks import Event

WIDTH, ROW, LEFT, TOP = 1180, 34, 130, 44
COLORS = {
    "step": "#d9d9d9", "plan": "#8dd3c7", "lay out": "#ffffb3", "forward": "#fb8072", "sample": "#bebada",
    "wait": "#eeeeee", "commit": "#80b1d3", "text": "#fdb462", "take jobs": "#b3de69", "publish": "#fccde5",
    "round trip": "#bc80bd", "device": "#fb8072",
}  # fmt: skip
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the profiler's device events."""


class Bar(NamedTuple):
    """A bar of one row."""

    row: str
    name: str
    began_us: float
    ended_us: float


def bars_of(events: Sequence[Event], *, is_cpu: bool) -> list[Bar]:
    """Return the bars: our marks by row, and the device, which on the CPU is the model's forward."""
    bars: list[Bar] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        ended_us = event["ts"] + event["dur"]
        if event.get("cat") == "sluice":
            name = event["name"]
            row = "queue" if name == "round trip" else "step" if name == "step" else "host"
            bars.append(Bar(row, name, event["ts"], ended_us))
            if is_cpu and name == "forward":
                bars.append(Bar("device", "device", event["ts"], ended_us))
        elif event.get("cat") in ON_DEVICE:
            bars.append(Bar("device", "device", event["ts"], ended_us))
    return sorted(bars, key=lambda bar: bar.began_us)


def window_of(bars: Sequence[Bar], *, num_steps: int) -> tuple[float, float]:
    """Return from and to (microseconds) of steps that compute, in the middle of all.

    Raises:
        ValueError: there are too few.
    """
    computing = [bar.began_us for bar in bars if bar.name == "forward"]
    steps = [bar for bar in bars if bar.row == "step" and any(bar.began_us <= at < bar.ended_us for at in computing)]
    if len(steps) < num_steps:
        raise ValueError(f"the trace has {len(steps)} steps that compute, not {num_steps}")
    first = (len(steps) - num_steps) // 2
    return steps[first].began_us, steps[first + num_steps - 1].ended_us


def picture(bars: Sequence[Bar], window: tuple[float, float], *, title: str) -> str:
    """Draw the bars of a window, one line for each row."""
    rows = ["queue", "step", "host", "device"]
    scale = (WIDTH - LEFT - 10) / (window[1] - window[0])
    height = TOP + ROW * len(rows) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
        *(f'<text x="10" y="{TOP + ROW * index + 20}">{name}</text>' for index, name in enumerate(rows)),
    ]  # fmt: skip
    for bar in bars:
        if bar.ended_us > window[0] and bar.began_us < window[1]:
            parts.append(_rectangle(bar, window, scale, TOP + ROW * rows.index(bar.row)))
    parts += _legend(sorted({bar.name for bar in bars} - {"device"}), TOP + ROW * len(rows) + 16)
    parts.append(f'<text x="10" y="{height - 8}">{_ms(window[1] - window[0])} from left to right</text></svg>')
    return "\n".join(parts) + "\n"


def _rectangle(bar: Bar, window: tuple[float, float], scale: float, y: int) -> str:
    left = LEFT + (max(bar.began_us, window[0]) - window[0]) * scale
    width = max(0.4, (min(bar.ended_us, window[1]) - max(bar.began_us, window[0])) * scale)
    said = f"{bar.name} {_ms(bar.ended_us - bar.began_us)}"
    label = f'<text x="{left + 3:.1f}" y="{y + 18}">{escape(said)}</text>' if width > 7 * len(said) else ""
    return (
        f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 6}" fill="{COLORS.get(bar.name, "#ccc")}" '
        f'stroke="#555" stroke-width="0.3"><title>{escape(said)}</title></rect>{label}'
    )


def _legend(names: Sequence[str], y: int) -> list[str]:
    return [
        f'<rect x="{LEFT + 95 * index}" y="{y}" width="12" height="12" fill="{COLORS.get(name, "#ccc")}"/>'
        f'<text x="{LEFT + 95 * index + 16}" y="{y + 10}">{escape(name)}</text>'
        for index, name in enumerate(names)
    ]


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f} ms"
