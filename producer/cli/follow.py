"""The command `producer follow`, which shows the progress of a batch from anywhere."""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import click

from sluice.producer.cli.common import connection_options, is_watched, json_option, note, option, producer_of
from sluice.producer.cli.durations import TIME
from sluice.producer.cli.hints import suggested
from sluice.producer.operations.batches import known_batch
from sluice.protocol.calls import BatchView
from sluice.protocol.host.terminal import say

EVERY_S, RATE_S, MORE_WITHIN = 1.0, 30.0, "1m"
SOME_FAILED = 1

Show = Callable[["BatchProgress"], None]


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch is."""

    batch: BatchView
    per_s: float | None
    """Jobs that ended per second, lately; None at first."""

    @property
    def left_s(self) -> float | None:
        """Seconds until its present jobs have ended, at this rate; None if that cannot be told."""
        return (self.batch.total - self.batch.ended) / self.per_s if self.per_s else None

    def line(self) -> str:
        """Write it as a line."""
        batch = self.batch
        counts = {name: getattr(batch, name) for name in ("done", "failed", "cancelled", "expired")}
        parts = [f"{batch.ended}/{batch.total}", *(f"{count} {name}" for name, count in counts.items() if count)]
        if self.per_s:
            parts.append(f"{self.per_s:.1f}/s")
        if self.left_s:
            parts.append(f"about {self.left_s:.0f} s left")
        return "  ".join(parts)


@dataclass(slots=True, eq=False)
class Rate:
    """Jobs that ended per second over the last looks. Changes with each look."""

    _seen: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def per_s(self, num_ended: int, now_s: float) -> float | None:
        """Note how many have ended now, and return the rate."""
        self._seen.append((now_s, num_ended))
        while now_s - self._seen[0][0] > RATE_S:
            self._seen.popleft()
        began_s, before = self._seen[0]
        return (num_ended - before) / (now_s - began_s) if now_s > began_s else None


@dataclass(slots=True, eq=False)
class BatchEnd:
    """Whether a batch is over. Changes with each look."""

    more_within_s: float
    """How long to wait for more jobs of an open batch."""

    _total: int = 0
    _ended_s: float | None = None
    """Since when all of `_total` jobs have ended."""

    def is_over(self, batch: BatchView, now_s: float) -> bool:
        """Whether no more jobs will end: a closed batch gets none, and an open one has got none for a while."""
        if batch.ended < batch.total or batch.total != self._total:
            self._total, self._ended_s = batch.total, None
        if batch.ended < batch.total:
            return False
        if self._ended_s is None:
            self._ended_s = now_s
        return batch.is_closed or now_s - self._ended_s >= self.more_within_s


@click.command()
@click.argument("batch")
@option(
    "--more-within",
    TIME,
    None,
    "Wait this long for more jobs of an open batch after all its jobs have ended.",
    name="more_within_s",
    default=MORE_WITHIN,
)
@json_option
@connection_options
def follow(batch: str, *, more_within_s: float, as_json: bool, **values: object) -> None:
    """Show the progress of a batch until it is closed and all of its jobs have ended.

    An open batch may get more jobs. It is over once all have ended and no new one came for `--more-within`.

    Works from any host, also after the process that submitted the batch has left. The exit code is 1 if a job failed,
    was cancelled or expired.

    \b
    Example:
        producer follow nightly
    """
    rate, end = Rate(), BatchEnd(more_within_s)
    with producer_of(values) as producer, _shown(as_json=as_json) as show:
        while True:
            view = producer.run(known_batch(producer.target, batch))
            show(BatchProgress(view, rate.per_s(view.ended, time.monotonic())))
            if end.is_over(view, time.monotonic()):
                break
            time.sleep(EVERY_S)
    if not view.is_closed:
        note(f"the batch is still open: {suggested('producer batches close', batch)}")
    sys.exit(0 if view.done == view.total else SOME_FAILED)


@contextmanager
def _shown(*, as_json: bool) -> Generator[Show]:
    """Show progress as a bar if stderr is a terminal, otherwise as a line whenever it has changed."""
    if not as_json and is_watched():
        with _bar() as show:
            yield show
        return
    last: list[BatchView] = []

    def show_change(progress: BatchProgress) -> None:
        if last != [progress.batch]:
            last[:] = [progress.batch]
            facts = {**asdict(progress.batch), "per_s": progress.per_s, "left_s": progress.left_s}
            say(json.dumps(facts) if as_json else progress.line())

    yield show_change


@contextmanager
def _bar() -> Generator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[line]}"))
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("", line="")

        def show(progress: BatchProgress) -> None:
            batch = progress.batch
            bars.update(task, description=batch.id, completed=batch.ended, total=batch.total, line=progress.line())

        yield show
