"""Draw the README's comparison with other engines as bars, from `docs/images/compared-engines.json`.

The figures come from `python -m benchmarks engines`; docs/performance.md has them with their spread.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

DATA = Path(__file__).parents[2] / "docs" / "images" / "compared-engines.json"

WIDTH, LEFT, BAR, GAP = 828, 232, 20, 6
"""Pixels: the picture, where bars begin, a bar's height, and the space between bars."""
HEADER, GROUP, BARS_WIDTH = 64, 40, 530

STYLE = """
svg{--back:#fff;--text:#1f2328;--dim:#59636e;--ours:#0969da;--other:#afb8c1;--edge:#d0d7de}
@media(prefers-color-scheme:dark){svg{--back:#0d1117;--text:#e6edf3;--dim:#8b949e;--ours:#4493f8;--other:#484f58;
--edge:#30363d}}
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace;
fill:var(--text)}
.h{font-size:15px;font-weight:600}.g{font-weight:600}.d{fill:var(--dim);font-size:12px}
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens per second of each engine, for each number of sequences."""

    title: str
    note: str
    engines: tuple[str, ...]
    rows: tuple[tuple[str, tuple[int | None, ...]], ...]
    """None: an engine that was not measured there."""


def load() -> Comparison:
    """Read the figures."""
    data = json.loads(DATA.read_text())
    rows = tuple((row["label"], tuple(row["tokens_per_s"])) for row in data["rows"])
    return Comparison(data["title"], data["note"], tuple(data["engines"]), rows)


def draw(comparison: Comparison) -> str:
    """Draw a group of bars for each number of sequences; the first engine is ours."""
    groups = [(label, _measured(comparison.engines, figures)) for label, figures in comparison.rows]
    most = max(figure for _, measured in groups for _, figure in measured)
    height = HEADER + sum(_height(measured) for _, measured in groups) + 12
    parts = [
        f'<text class="h" x="20" y="32">{escape(comparison.title)}</text>',
        f'<text class="d" x="20" y="53">{escape(comparison.note)}</text>',
    ]
    top = HEADER
    for label, measured in groups:
        parts.append(f'<text class="g" x="20" y="{top + 28}">{escape(label)}</text>')
        for place, (engine, figure) in enumerate(measured):
            y = top + GROUP + place * (BAR + GAP)
            parts += _bar(engine, figure, y=y, width=round(BARS_WIDTH * figure / most), is_ours=place == 0)
        top += _height(measured)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">
<title>{escape(comparison.title)}</title>
<style>{STYLE}</style>
<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="var(--back)" stroke="var(--edge)"/>
{chr(10).join(parts)}
</svg>
"""


def _measured(engines: tuple[str, ...], figures: tuple[int | None, ...]) -> list[tuple[str, int]]:
    return [(engine, figure) for engine, figure in zip(engines, figures, strict=True) if figure is not None]


def _height(measured: list[tuple[str, int]]) -> int:
    return GROUP + len(measured) * (BAR + GAP)


def _bar(engine: str, figure: int, *, y: int, width: int, is_ours: bool) -> list[str]:
    color = "ours" if is_ours else "other"
    weight = ' class="g"' if is_ours else ""
    return [
        f'<text{weight} x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(engine)}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{width}" height="{BAR}" rx="3" fill="var(--{color})"/>',
        f'<text{weight} x="{LEFT + width + 8}" y="{y + 15}">{figure}</text>',
    ]
