"""Queries of metrics, aggregated as the table of metrics says: whole queues by `max`, processes by `sum`."""

import re
from dataclasses import dataclass

from sluice.protocol.metrics import METRICS, PREFIX, Metric

RATE = "$__rate_interval"
SCRAPED = ("job", "instance")
"""Labels that Prometheus itself adds: the scrape job, which is one per queue, and the process."""

_NAME = re.compile(rf"\b{PREFIX}\w+")
_LABELS = re.compile(r"\b(?:by|on) \(([^)]*)\)|[{,](\w+)(?:=~?|!=)")


@dataclass(frozen=True, slots=True)
class Used:
    """The names in an expression."""

    samples: frozenset[str]
    labels: frozenset[str]


def used_in(expression: str) -> Used:
    """Return the metrics and labels that an expression names."""
    found = [one for pair in _LABELS.findall(expression) for one in pair if one]
    labels = {label.strip() for some in found for label in some.split(",")}
    return Used(frozenset(_NAME.findall(expression)), frozenset(labels))


def now(name: str, *labels: str) -> str:
    """Return a gauge's value: of a queue, the same from every process, by scrape job; of processes, the sum."""
    metric = METRICS[name]
    how = "max" if metric.is_of_queue else "sum"
    return f"{how} by ({_by(metric, labels)}) ({metric.sample})"


def rate(name: str, *labels: str, window: str = RATE) -> str:
    """Return how fast a counter rises, a second."""
    metric = METRICS[name]
    how = "max" if metric.is_of_queue else "sum"
    return f"{how} by ({_by(metric, labels)}) (rate({metric.sample}[{window}]))"


def increase(name: str, *labels: str, window: str) -> str:
    """Return by how much a counter has risen in a time."""
    metric = METRICS[name]
    how = "max" if metric.is_of_queue else "sum"
    return f"{how} by ({_by(metric, labels)}) (increase({metric.sample}[{window}]))"


def growth(name: str, *, window: str) -> str:
    """Return by how much a gauge has grown in a time."""
    metric = METRICS[name]
    return f"max by ({_by(metric, ())}) (delta({metric.sample}[{window}]))"


def percentile(name: str, share: float) -> str:
    """Return a percentile of a histogram over all processes of a scrape job."""
    sample = METRICS[name].sample
    return f"histogram_quantile({share:g}, sum by (job, le) (rate({sample}_bucket[{RATE}])))"


def _by(metric: Metric, labels: tuple[str, ...]) -> str:
    return ", ".join(labels or (metric.labels if metric.is_of_queue and metric.labels else ("job",)))
