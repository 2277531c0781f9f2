"""Grafana's dashboard: rows of panels over the metrics of workers and gateways."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tools.monitoring.queries import now, percentile, rate

Json = dict[str, Any]  # Any: as Grafana has it

COLUMNS, HEIGHT, PANELS_IN_ROW = 24, 8, 3
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 39


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph: its title, unit, and (legend, query) of each line."""

    title: str
    unit: str
    lines: Sequence[tuple[str, str]]


KV_SHARE = f"{now('kv_tokens_used', 'instance')} / {now('kv_tokens_total', 'instance')}"
PLACES_SHARE = f"{now('places_used', 'instance')} / {now('places', 'instance')}"
CACHED_SHARE = f"{rate('cached_tokens')} / {rate('prompt_tokens')}"
ACCEPTED_SHARE = f"{rate('accepted_tokens')} / {rate('drafted_tokens')}"


def _percentiles(name: str) -> list[tuple[str, str]]:
    return [(f"{{{{job}}}} p{share * 100:g}", percentile(name, share)) for share in (0.5, 0.95, 0.99)]


ROWS: dict[str, Sequence[Panel]] = {
    "Queues": (
        Panel("Waiting and running jobs", "short", [
            ("{{queue}} can start", now("scale_backlog_jobs")), ("{{queue}} running", now("scale_running_jobs")),
            ("{{queue}} waiting, with delayed ones", now("queue_depth_jobs")),
        ]),
        Panel("Age of the oldest job, time to the nearest deadline", "s", [
            ("{{queue}} oldest", now("scale_oldest_age_seconds")),
            ("{{queue}} deadline", now("scale_nearest_deadline_seconds")),
        ]),
        Panel("Workers that live, and that are wanted", "short", [
            ("{{queue}} living", now("scale_workers")), ("{{queue}} wanted", now("scale_wanted_workers")),
        ]),
        Panel("Jobs that ended", "ops", [("{{job}} {{state}}", rate("jobs_ended", "job", "state"))]),
        Panel("Tokens of pulled jobs", "short", [("{{queue}}", rate("tokens_pulled", "queue"))]),
        Panel("Waiting for recorder and callbacks", "short", [
            ("{{queue}} outbox", now("queue_outbox")), ("{{queue}} callbacks", now("queue_callbacks")),
        ]),
        Panel("Dead set, suspects, paused", "short", [
            ("{{queue}} dead", now("queue_dead")), ("{{queue}} suspects", now("queue_suspects")),
            ("{{queue}} paused", now("queue_paused")),
        ]),
    ),
    "Tokens": (
        Panel("Output tokens a second", "short", [("{{instance}}", rate("output_tokens", "instance"))]),
        Panel("Prompt tokens a second", "short", [
            ("{{job}} all", rate("prompt_tokens")), ("{{job}} cached", rate("cached_tokens")),
            ("{{job}} from the host", rate("loaded_tokens")),
        ]),
        Panel("Shares of tokens", "percentunit", [
            ("{{job}} prompts cached", CACHED_SHARE), ("{{job}} drafts accepted", ACCEPTED_SHARE),
        ]),
    ),
    "Latency": (
        Panel("Time to first token", "s", _percentiles("ttft_seconds")),
        Panel("Time from token to token", "s", _percentiles("itl_seconds")),
        Panel("Time to the end", "s", _percentiles("e2e_seconds")),
    ),
    "Engine and KV cache": (
        Panel("KV cache and places in use", "percentunit", [
            ("{{instance}} KV", KV_SHARE), ("{{instance}} places", PLACES_SHARE),
        ]),
        Panel("Busy", "percentunit", [
            ("{{instance}} loop", now("loop_busy", "instance")),
            ("{{instance}} occupancy", now("step_occupancy", "instance")),
            ("{{instance}} GPU", now("device_utilisation", "instance")),
        ]),
        Panel("Preemptions a second, sequences that wait", "short", [
            ("{{instance}} preemptions", rate("preemptions", "instance")),
            ("{{instance}} waiting", now("engine_waiting", "instance")),
        ]),
    ),
    "Takeovers and failures": (
        Panel("Workers that died, leases taken over", "ops", [
            ("{{queue}} deaths", rate("queue_worker_deaths")),
            ("{{instance}} leases lost", rate("jobs_lost", "instance")),
            ("{{instance}} writes refused", rate("refused_writes", "instance")),
        ]),
        Panel("Retries and failed steps", "ops", [
            ("{{instance}} retries", rate("jobs_retried", "instance")),
            ("{{instance}} failed steps", rate("failed_steps", "instance")),
        ]),
        Panel("Outages of Redis, results missed", "ops", [
            ("{{instance}} outages", rate("redis_outages", "instance")),
            ("{{queue}} results", rate("queue_results_missed")),
        ]),
    ),
    "Tenants": (
        Panel("Waiting jobs", "short", [("{{queue}} {{tenant}}", now("tenant_waiting_jobs"))]),
        Panel("Waiting tokens", "short", [("{{queue}} {{tenant}}", now("tenant_waiting_tokens"))]),
    ),
    "Gateway": (
        Panel("Requests by status", "reqps", [("{{status}}", rate("gateway_requests", "status"))]),
        Panel("Requests refused, by bound", "reqps", [("{{bound}}", rate("gateway_refused", "bound"))]),
    ),
}  # fmt: skip


def dashboard() -> Json:
    """Return the dashboard as Grafana imports it."""
    return {
        "uid": "sluice",
        "title": "Sluice",
        "tags": ["sluice"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[Json]:
    number, top = 1, 0
    for title, panels in ROWS.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        number, top = number + 1, top + 1
        in_row = min(PANELS_IN_ROW, len(panels))
        width = COLUMNS // in_row
        for index, panel in enumerate(panels):
            column, line = index % in_row, index // in_row
            place = {"h": HEIGHT, "w": width, "x": column * width, "y": top + line * HEIGHT}
            yield _graph(panel, number) | {"gridPos": place}
            number += 1
        top += HEIGHT * -(-len(panels) // in_row)


def _graph(panel: Panel, number: int) -> Json:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.lines)
        ],
    }
