"""Draw what each iteration of the engine does: `python -m tools.pictures.iterations` writes docs/images/iterations.svg.

Six requests in virtual time, on an engine that is small enough for all of them to be seen.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sluice.engine.config import EngineConfig
from sluice.engine.null_model import NullModelConfig
from sluice.engine.scheduling.timing.step_time import StepTime
from sluice.engine.watching import Computing, Iteration
from sluice.worker.tune.replay import Arrival, simulate
from tools.pictures.chart import STYLE

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "iterations.svg"

ARRIVALS = (
    Arrival(at_s=0.00, num_prompt_tokens=48, num_output_tokens=13),
    Arrival(at_s=0.00, num_prompt_tokens=30, num_output_tokens=4),
    Arrival(at_s=0.02, num_prompt_tokens=12, num_output_tokens=11),
    Arrival(at_s=0.03, num_prompt_tokens=8, num_output_tokens=16),
    Arrival(at_s=0.05, num_prompt_tokens=8, num_output_tokens=7),
    Arrival(at_s=0.10, num_prompt_tokens=20, num_output_tokens=7),
)
CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32)
CACHE = NullModelConfig(num_blocks=14, block_size=8, max_model_len=128)
STEP_TIME = StepTime(fixed_s=0.010, token_s=0.0002)

LEFT, TOP, CELL, ROW, CHART = 92, 84, 26, 30, 54
"""Pixels: where columns and rows begin, a column's width, a row's height, and that of a chart below."""

COLORS = """
svg{--prompt:#ffe066;--decode:#a5c8ff;--wait:#e3e6ea;--lost:#cf222e}
@media(prefers-color-scheme:dark){svg{--prompt:#7d6608;--decode:#1f4f8f;--wait:#21262d;--lost:#ff7b72}}
.c{font-size:11px;text-anchor:middle}.l{fill:var(--lost)}.e{text-anchor:end}
"""


def iterations() -> list[Iteration]:
    """Run the example."""
    seen: list[Iteration] = []
    simulate(ARRIVALS, STEP_TIME, CONFIG, CACHE, watcher=seen.append)
    return seen


def draw(seen: Sequence[Iteration]) -> str:
    """Draw a column for each iteration and a row for each request, and below them tokens and blocks."""
    bottom = TOP + ROW * len(ARRIVALS)
    width, height = LEFT + CELL * len(seen) + 24, bottom + 2 * (CHART + 34) + 10
    tokens = [(iteration.num_tokens, iteration.max_tokens) for iteration in seen]
    blocks = [(iteration.num_blocks - iteration.num_free_blocks, iteration.num_blocks) for iteration in seen]
    parts = [
        *_legend(),
        *(
            _text(LEFT + CELL * column + CELL / 2, TOP - 10, str(iteration.number), "c d")
            for column, iteration in enumerate(seen)
        ),
        *(_text(LEFT - 12, TOP + ROW * row + 20, f"request {_letter(str(row))}", "e") for row in range(len(ARRIVALS))),
        *(part for column, iteration in enumerate(seen) for part in _column(LEFT + CELL * column, iteration)),
        *_chart(bottom + 34, "tokens", tokens, "prompt"),
        *_chart(bottom + CHART + 68, "blocks", blocks, "decode"),
    ]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<title>Iterations of the engine: who waits, runs, is preempted and leaves</title>
<style>{STYLE}{COLORS}</style>
<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="var(--back)" stroke="var(--edge)"/>
{chr(10).join(parts)}
</svg>
"""


def _legend() -> Iterator[str]:
    x = 20
    for color, label in (("prompt", "prompt tokens"), ("decode", "one token"), ("wait", "waits")):
        yield _box(x, 18, 20, 20, color)
        yield _text(x + 27, 33, label)
        x += 48 + 8 * len(label)
    yield _text(x, 33, "✕ preempted", "l")
    yield _text(x + 120, 33, "● leaves")


def _column(x: int, iteration: Iteration) -> Iterator[str]:
    for name in iteration.waiting:
        yield _box(x + 1, _y(name) + 3, CELL - 2, ROW - 6, "wait")
    for row in (*iteration.joined, *iteration.running):
        yield from _cell(x, row)
    for name in iteration.preempted:
        yield _text(x + CELL / 2, _y(name) + 20, "✕", "c l")
    for name, _ in iteration.left:
        yield _text(x + CELL - 6, _y(name) + 11, "●", "c")


def _cell(x: int, row: Computing) -> Iterator[str]:
    yield _box(x + 1, _y(row.name) + 3, CELL - 2, ROW - 6, "prompt" if row.num_tokens > 1 else "decode")
    yield _text(x + CELL / 2 - 1, _y(row.name) + 20, str(row.num_tokens), "c")


def _chart(y: int, name: str, values: Iterable[tuple[int, int]], color: str) -> Iterator[str]:
    """Draw a bar of each value against its limit."""
    yield _text(LEFT - 12, y + CHART - 4, name, "e")
    for column, (value, limit) in enumerate(values):
        x, height = LEFT + CELL * column, round(CHART * value / limit)
        yield _box(x + 1, y, CELL - 2, CHART, "wait")
        yield _box(x + 1, y + CHART - height, CELL - 2, height, color)
        yield _text(x + CELL / 2, y + CHART + 14, str(value), "c d")
        if column == 0:
            yield _text(LEFT - 12, y + 12, f"of {limit}", "e d")


def _y(name: str) -> int:
    return TOP + ROW * int(name.partition("/")[0])


def _letter(number: str) -> str:
    return "ABCDEFGH"[int(number)]


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="var(--{color})"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text{f" class={kind!r}" if kind else ""} x="{x:g}" y="{y:g}">{text}</text>'.replace("'", '"')


if __name__ == "__main__":
    PICTURE.write_text(draw(iterations()))
