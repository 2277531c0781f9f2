"""The dashboard and the alerts: written from the table of metrics, and what Prometheus and Grafana read."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sluice.protocol.metrics import METRICS
from tools.monitoring.alerts import ALERTS
from tools.monitoring.dashboard import COLUMNS, dashboard
from tools.monitoring.files import ALERT_RULES, contents
from tools.monitoring.queries import SCRAPED, used_in

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: apt-get install prometheus")

Json = dict[str, Any]  # Any: as Grafana has it
PANELS: list[Json] = dashboard()["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
EXPRESSIONS = [
    *(pytest.param(alert.expression, id=alert.name) for alert in ALERTS),
    *(pytest.param(one["expr"], id=f"{panel['title']} {one['refId']}") for panel in GRAPHS for one in panel["targets"]),
]
SAMPLES = {
    f"{metric.sample}{ending}": metric
    for metric in METRICS.values()
    for ending in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}

# A queue without workers, one whose recorder is away, and one whose Redis is away; all is well until then.
SERIES = [
    {"series": 'sluice_scale_backlog_jobs{job="g", queue="q"}', "values": "5x30"},
    {"series": 'sluice_scale_workers{job="g", queue="q"}', "values": "1x9 0x20"},
    {"series": 'sluice_queue_outbox{job="w", instance="a", queue="q"}', "values": "0+200x30"},
    {"series": 'sluice_places{job="r", instance="b"}', "values": "64x30"},
    {"series": 'sluice_queue_outbox{job="r", instance="b", queue="r"}', "values": "0x9"},
    {"series": 'sluice_gateway_requests_total{job="g", status="200"}', "values": "0+100x30"},
    {"series": 'sluice_gateway_requests_total{job="g", status="503"}', "values": "0x9 0+50x20"},
    {"series": 'sluice_queue_worker_deaths_total{job="w", instance="a", queue="q"}', "values": "0x20 1x9"},
]
FIRING = {
    "SluiceNoWorker": {"queue": "q"},
    "SluiceOutboxGrows": {"queue": "q"},
    "SluiceRedisAway": {"instance": "b"},
    "SluiceGatewayErrors": {"job": "g"},
    "SluiceWorkersDie": {"queue": "q"},
}


@pytest.mark.parametrize("path", contents(), ids=lambda path: path.name)
def test_each_file_is_what_the_command_writes(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == contents()[path], "run `python -m tools.monitoring`"


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_when_an_expression_names_metrics_then_they_and_their_labels_are_in_the_table(expression: str) -> None:
    used = used_in(expression)

    assert used.samples
    assert used.samples <= SAMPLES.keys()
    known = {label for sample in used.samples for label in SAMPLES[sample].labels}
    assert used.labels <= {*known, *SCRAPED, *(["le"] if any(one.endswith("_bucket") for one in used.samples) else [])}


def test_each_subject_has_a_row_and_each_worker_metric_of_it_a_graph() -> None:
    shown = {sample for panel in GRAPHS for one in panel["targets"] for sample in used_in(one["expr"]).samples}

    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert rows == [
        *("Queues", "Tokens", "Latency", "Engine and KV cache", "Takeovers and failures", "Tenants", "Gateway")
    ]
    left_out = set(METRICS) - {SAMPLES[sample].name for sample in shown}
    assert left_out == {
        *("steps", "jobs_pulled", "round_trips", "tokens_per_second", "kernels_replaced"),
        *("queue_depth_tokens", "queue_oldest_age_seconds"),  # the gateway's are of the same
        *("scale_backlog_tokens", "scale_running_tokens", "scale_worker_tokens_per_second", "scale_paused"),
    }


class TestGivenTheDashboard:
    """Its structure is that of Grafana's export; Grafana itself is not run."""

    def test_when_it_is_read_then_graphs_have_numbers_queries_and_the_chosen_source(self) -> None:
        source = {"type": "prometheus", "uid": "${datasource}"}

        assert [one["name"] for one in dashboard()["templating"]["list"]] == ["datasource"]
        assert len({panel["id"] for panel in PANELS}) == len(PANELS)
        for panel in GRAPHS:
            targets = panel["targets"]
            assert panel["datasource"] == source
            assert len({one["refId"] for one in targets}) == len(targets) > 0
            assert all(one["datasource"] == source and one["legendFormat"] for one in targets)

    def test_when_it_is_drawn_then_no_panel_covers_another(self) -> None:
        cells = [cell for panel in PANELS for cell in _cells(panel["gridPos"])]

        assert len(set(cells)) == len(cells)
        assert max(column for column, _ in cells) < COLUMNS


def _cells(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    for column in range(place["x"], place["x"] + place["w"]):
        for line in range(place["y"], place["y"] + place["h"]):
            yield column, line


@needs_promtool
class TestGivenPromtool:
    def test_when_it_checks_the_rules_then_they_are_valid(self) -> None:
        done = subprocess.run(
            [str(PROMTOOL), "check", "rules", str(ALERT_RULES)], capture_output=True, text=True, check=False
        )

        assert (done.returncode, f"{len(ALERTS)} rules found" in done.stdout) == (0, True), done.stderr

    def test_when_things_go_wrong_then_the_alerts_of_them_fire_and_only_those(self, tmp_path: Path) -> None:
        times = [("9m", alert.name, False) for alert in ALERTS] + [("25m", alert.name, True) for alert in ALERTS]
        tests: list[Json] = [
            {"eval_time": at, "alertname": name, "exp_alerts": list(_expected(name)) if is_late else []}
            for at, name, is_late in times
        ]
        written: Json = {
            "rule_files": [str(ALERT_RULES)],
            "tests": [{"interval": "1m", "input_series": SERIES, "alert_rule_test": tests}],
        }
        (tmp_path / "tests.yaml").write_text(yaml.safe_dump(written))

        done = subprocess.run(
            [str(PROMTOOL), "test", "rules", str(tmp_path / "tests.yaml")], capture_output=True, text=True, check=False
        )

        assert done.returncode == 0, done.stdout + done.stderr


def _expected(name: str) -> Iterator[Json]:
    if name in FIRING:
        (alert,) = (one for one in ALERTS if one.name == name)
        yield {
            "exp_labels": {"severity": alert.severity, **FIRING[name]},
            "exp_annotations": {"summary": alert.meaning, "runbook": alert.action},
        }
