"""Draw the state of queues and their workers. No I/O."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sluice.protocol.host.terminal import printable
from sluice.protocol.scaling.backlog import Backlog
from sluice.protocol.workers import NUM_SAMPLES, WorkerRow
from sluice.worker.top.state import TopState

BARS = " ▁▂▃▄▅▆▇█"
KEYS = "↑↓ select  s sort  / filter  z quiet  c resume  d drain  q quit"
NUMERIC = ("RUN", "WAIT", "KV", "TOK/S")
NAMES = {"HOST": 3, "NAME": 3, "MODEL": 3, "DEVICE": 2}
"""Columns that share the width that figures leave, in these parts."""

BATCH_SAMPLES = 12
"""Two minutes of a worker's batch: all five leave no width for names."""


def screen(backlogs: Sequence[Backlog], rows: Sequence[WorkerRow], state: TopState) -> Group:
    """Draw the screen; `rows` are the visible ones, in order."""
    none = Text("no worker matches" if state.pattern else "no living workers")
    table = _table(rows, state) if rows else none
    return Group(*map(_queue_line, backlogs), _chart(rows), Text(), table, Text(), _bottom(state))


def sparkline(values: Sequence[float], highest: float) -> str:
    """Draw one character for each value, from 0 to `highest`."""
    top = len(BARS) - 1
    return "".join(BARS[min(top, -int(-value * top // highest))] if highest > 0 else BARS[0] for value in values)


def _queue_line(backlog: Backlog) -> Text:
    line = Text(f"queue {backlog.queue}", style="bold")
    if backlog.is_paused:
        line.append("  paused", style="yellow")
    oldest = "" if backlog.oldest_age_s is None else f", oldest {backlog.oldest_age_s:,.0f} s"
    facts = f"   {backlog.backlog_jobs:,} waiting ({backlog.backlog_tokens:,} tokens{oldest})"
    line.append(facts + f"   {backlog.running_jobs:,} running   {_workers(backlog.workers)}", style="not bold")
    return line


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count:,} workers"


def _chart(rows: Sequence[WorkerRow]) -> Text:
    """Draw the output tokens per second of all of them, over the last minutes."""
    sums = [0] * NUM_SAMPLES
    for row in rows:
        for place, sample in enumerate(reversed(row.samples), start=1):
            sums[-place] += sample.tokens_out
    line = Text("tokens/s ")
    line.append(sparkline(sums, max(sums)), style="cyan")
    now = sum(row.tokens_per_s for row in rows)
    return line.append(f" {now:,.0f}, at most {max(now, *sums):,.0f} in 5 minutes")


def _table(rows: Sequence[WorkerRow], state: TopState) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for name in ("WORKER", *NAMES, "STATE", *NUMERIC, "BATCH"):
        justify = "right" if name in NUMERIC else "left"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", ratio=NAMES.get(name))
    for row in rows:
        table.add_row(*map(Text, map(printable, _cells(row))), style="reverse" if row.id == state.selected else "")
    return table


def _cells(row: WorkerRow) -> tuple[str, ...]:
    batch = [sample.running for sample in row.samples[-BATCH_SAMPLES:]]
    places = f"{row.running:,}/{row.places:,}" if row.places else f"{row.running:,}"
    names = (row.id[:8], row.host, row.name, row.model, row.device, row.state.replace("_", " "))
    figures = (places, f"{row.waiting:,}", f"{row.kv_share:.0%}", f"{row.tokens_per_s:,.0f}")
    return (*names, *figures, sparkline(batch, max(batch, default=0)))


def _bottom(state: TopState) -> Text:
    if state.is_typing:
        return Text(f"filter: {state.pattern}▏")
    if state.asked is not None:
        return Text(f"{state.asked.value} worker {(state.selected or '')[:8]}? y/n", style="yellow")
    if state.message:
        return Text(printable(state.message), style="yellow")
    matching = f"  matching {state.pattern!r}" if state.pattern else ""
    return Text(f"{KEYS}  by {state.order}{matching}", style="dim")
