"""The files that are written, and their text."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from sluice.protocol.metrics import GATEWAY, WORKER, Metric
from tools.monitoring.alerts import ALERTS, rules
from tools.monitoring.dashboard import dashboard

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"
ALERT_RULES = ROOT / "deploy" / "grafana" / "alerts.yaml"
PAGE = ROOT / "docs" / "reference" / "metrics.md"
WRITTEN = "written by python -m tools.monitoring"
END = "<!-- end -->\n"


def contents() -> dict[Path, str]:
    """Return the text of each file."""
    alerts = yaml.safe_dump(rules(), sort_keys=False, width=1000)
    return {
        DASHBOARD: json.dumps(dashboard(), indent=1) + "\n",
        ALERT_RULES: f"# Alerts of Prometheus, {WRITTEN}: change tools/monitoring/alerts.py.\n{alerts}",
        PAGE: page(PAGE.read_text(encoding="utf-8")),
    }


def page(text: str) -> str:
    """Return the page with its tables replaced by the current ones."""
    for name, lines in (("worker", _metrics(WORKER)), ("gateway", _metrics(GATEWAY)), ("alerts", _alerts())):
        begin = f"<!-- {name}: {WRITTEN} -->\n"
        before, rest = text.split(begin)
        text = before + begin + "\n" + "\n".join(lines) + "\n\n" + END + rest.split(END, 1)[1]
    return text


def _metrics(metrics: Iterable[Metric]) -> Iterator[str]:
    yield "| metric | kind | labels | meaning |\n|---|---|---|---|"
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"| `{metric.sample.removeprefix('sluice_')}` | {metric.kind} | {labels} | {metric.about} |"


def _alerts() -> Iterator[str]:
    yield "| alert | fires when | meaning | action |\n|---|---|---|---|"
    for alert in ALERTS:
        yield f"| `{alert.name}` ({alert.severity}) | {alert.when} | {alert.meaning} | {alert.action} |"
