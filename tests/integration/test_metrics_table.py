"""Every metric and label of the table exists on a live worker and a live gateway, and no other one does."""

import urllib.request
from collections.abc import Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.history.writer import HistoryWriter
from sluice.producer import Producer
from sluice.protocol.metrics import GATEWAY, WORKER, Metric
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from tests.gateway.gateway_process import gateway_process
from tests.histories import opened_history
from tests.integration.jobs import wait_until
from tests.integration.workers import running_worker
from tests.servers import RedisServer, free_port

Names = dict[str, tuple[str, frozenset[str]]]
"""Kind and labels by name."""


def scraped(text: str) -> Names:
    """What a process serves."""
    return {
        family.name.removeprefix("sluice_"): (
            family.type,
            frozenset(label for sample in family.samples for label in sample.labels if label != "le"),
        )
        for family in text_string_to_metric_families(text)
        if family.samples
    }


def declared(metrics: Iterable[Metric]) -> Names:
    """What the table says."""
    return {metric.name: (metric.kind, frozenset(metric.labels)) for metric in metrics}


def optional(metrics: Iterable[Metric]) -> set[str]:
    """What may be absent."""
    return {metric.name for metric in metrics if metric.is_conditional}


@pytest.mark.slow
class TestGivenAWorkerAGatewayAndARecorder:
    def test_when_they_are_scraped_then_they_serve_what_the_table_declares(
        self, valkey: RedisServer, sqlite_url: str
    ) -> None:
        port = free_port()
        with (
            running_worker(valkey.url, metrics__enabled=True, metrics__port=port),
            Producer(valkey.url) as producer,
            opened_history(sqlite_url) as history,
            valkey.client() as client,
        ):
            producer.submit("hello", max_tokens=3)
            wait_until(lambda: '_ended_total{state="done"} 1.0' in _worker_text(port), "the end is counted")
            Recorder(client, HistoryWriter(history), RecorderSettings(name="r1")).drain()
            of_worker = scraped(_worker_text(port))
        with Producer(valkey.url) as producer:
            producer.submit("waits", tenant="acme", max_tokens=3, ttl_s=1000)
        with gateway_process(valkey.url, database_url=sqlite_url) as gateway:
            gateway.get("/v1/models")
            of_gateway = scraped(gateway.get("/metrics").text)

        assert declared(WORKER).items() >= of_worker.items()
        assert declared(WORKER).keys() - of_worker.keys() <= optional(WORKER)
        assert declared(GATEWAY).items() >= of_gateway.items()
        assert declared(GATEWAY).keys() - of_gateway.keys() == {"scale_worker_tokens_per_second"}


def _worker_text(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return answer.read().decode()
