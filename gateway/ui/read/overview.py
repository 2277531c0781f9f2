"""The state of all queues at one moment: their figures, workers and alerts. No I/O."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sluice.producer.operations.totals import QueueTotals, queue_totals
from sluice.protocol.calls import QueueView
from sluice.protocol.clock import wall_ms
from sluice.protocol.workers import NUM_SAMPLES, SAMPLE_S, Sample, WorkerRow, workers_of

TREND_S = 600.0
"""Time over which growth is computed, in seconds."""

MANY_EVENTS, NEARLY_FULL = 1000, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Percentiles of the time to first token of the last jobs."""

    p50_s: float | None = None
    p95_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCard:
    """A queue with its figures."""

    totals: QueueTotals
    tokens_in: float
    tokens_out: float
    ttft: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of a queue's server."""

    used_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that needs an operator's attention."""

    kind: str
    """`bad` or `warn`."""

    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The state of all queues."""

    at_ms: int
    queues: tuple[QueueCard, ...]
    workers: tuple[WorkerRow, ...]
    alerts: tuple[Alert, ...]

    @property
    def series(self) -> list[list[float | None]]:
        """Times in s; tokens a second of prompts, and of outputs, summed over the workers."""
        end_s = self.at_ms // 1000
        times = [end_s - SAMPLE_S * (NUM_SAMPLES - 1 - index) for index in range(NUM_SAMPLES)]
        columns: list[list[Sample]] = [[] for _ in times]
        for worker in self.workers:
            for column, sample in zip(reversed(columns), reversed(worker.samples), strict=False):
                column.append(sample)
        sums_in = [float(sum(figures.tokens_in for figures in column)) if column else None for column in columns]
        sums_out = [float(sum(figures.tokens_out for figures in column)) if column else None for column in columns]
        return [[float(at_s) for at_s in times], sums_in, sums_out]


@dataclass(slots=True, eq=False)
class Trends:
    """Recent values of counters, as this gateway saw them. Changes with each look."""

    _seen: dict[tuple[str, str], deque[tuple[float, int]]] = field(
        default_factory=dict[tuple[str, str], deque[tuple[float, int]]]
    )

    def growth(self, queue: str, counter: str, value: int, now_s: float) -> int:
        """Record a counter's value; return its growth over the last `TREND_S`."""
        samples = self._seen.setdefault((queue, counter), deque())
        while samples and now_s - samples[0][0] > TREND_S:
            samples.popleft()
        if not samples or now_s - samples[-1][0] >= SAMPLE_S:
            samples.append((now_s, value))
        return value - samples[0][1]


def overview(
    views: Mapping[str, Sequence[QueueView]],
    latencies: Mapping[str, Latency],
    memory: Memory | None,
    trends: Trends,
    *,
    stalled: Sequence[str] = (),
) -> Overview:
    """Sum up the surveys of the queues. `stalled`: queues with batches that no callbacks process continues."""
    workers = tuple(row for name, of_queue in views.items() for row in workers_of(name, of_queue))
    cards = tuple(_card(name, of_queue, workers, latencies.get(name, Latency())) for name, of_queue in views.items())
    alerts = [alert for card in cards for alert in _alerts(card.totals, trends)]
    return Overview(
        at_ms=wall_ms(),
        queues=cards,
        workers=workers,
        alerts=(*_memory_alerts(memory), *alerts, *map(_stalled_alert, stalled)),
    )


def _card(name: str, views: Sequence[QueueView], workers: Sequence[WorkerRow], ttft: Latency) -> QueueCard:
    own = [worker for worker in workers if worker.queue == name]
    return QueueCard(
        totals=queue_totals(name, views),
        tokens_in=sum(worker.samples[-1].tokens_in for worker in own if worker.samples),
        tokens_out=sum(worker.tokens_per_s for worker in own),
        ttft=ttft,
    )


def _alerts(totals: QueueTotals, trends: Trends) -> Iterator[Alert]:
    now_s, name = time.monotonic(), totals.queue
    outbox = trends.growth(name, "outbox", totals.outbox, now_s)
    dead = trends.growth(name, "dead", totals.dead, now_s)
    if totals.paused:
        yield Alert("warn", f"Queue {name} is paused.", f"Resume it: producer queues resume --queue {name}")
    if totals.waiting and not totals.workers:
        text = f"{_jobs(totals.waiting)} waiting. Start one: worker start --queue {name}"
        yield Alert("bad", f"No worker serves queue {name}.", text)
    if outbox > 0 and totals.outbox >= MANY_EVENTS:
        text = f"{totals.outbox:,} events wait for the history, {outbox:,} more than before. Is a recorder running?"
        yield Alert("warn", f"The outbox of queue {name} grows.", text)
    if dead > 0:
        text = f"{_jobs(totals.dead)} failed for good, {dead:,} in the last minutes. See the dead set."
        yield Alert("bad", f"The dead set of queue {name} grows.", text)
    if totals.suspects:
        text = f"{_jobs(totals.suspects)} running when several workers died; each is run alone."
        yield Alert("warn", f"Queue {name} has suspects.", text)


def _stalled_alert(name: str) -> Alert:
    text = f"No callbacks process serves it. Start one: worker callbacks --queue {name}"
    return Alert("bad", f"Batches of queue {name} have stopped.", text)


def _jobs(number: int) -> str:
    return f"{number:,} job{'' if number == 1 else 's'}"


def _memory_alerts(memory: Memory | None) -> Iterator[Alert]:
    if memory is None or not memory.max_bytes:
        return
    share = memory.used_bytes / memory.max_bytes
    if share >= NEARLY_FULL:
        text = f"{100 * share:.0f} % of maxmemory is used. When it is full, submits are refused."
        yield Alert("bad", "Redis is near its limit.", text)
