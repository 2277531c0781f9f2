"""The recorder exports traces to a real collector, and one that is away costs no row."""

import socket
import subprocess
import sys
from collections.abc import Generator, Sequence

import pytest
from sqlalchemy.engine import Engine
from sqlalchemy.event import listen
from structlog.testing import capture_logs

from sluice.history.rows import Submission
from sluice.history.writer import HistoryWriter
from sluice.worker.log import get_log
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from sluice.worker.traces import exporter as exporting
from sluice.worker.traces.exporter import TraceExporter
from tests.history import events as e
from tests.history.test_recorder import add, client_of, states
from tests.servers import RedisServer
from tests.worker.callbacks.receiver import Receiver, receiver
from tests.worker.traces.collector import service_of, spans_at


@pytest.fixture
def collector() -> Generator[Receiver]:
    with receiver() as state:
        yield state


@pytest.fixture
def exporter(history: Engine, collector: Receiver) -> TraceExporter:
    return TraceExporter(history, collector.url, get_log())


def record(valkey: RedisServer, history: Engine, exporter: TraceExporter, *entries: list[e.Packed]) -> None:
    """Record these entries with an exporter, and stop it."""
    client = client_of(valkey)
    add(client, *entries)
    settings = RecorderSettings(queues=(e.QUEUE,), name="r1", block_s=0.05)
    Recorder(client, HistoryWriter(history), settings, on_ended=exporter.ended).drain()
    exporter.stop()


def one_job(job_id: str) -> list[e.Packed]:
    return [e.submitted(job_id), e.started(job_id), e.ended(job_id)]


class TestGivenACollector:
    def test_when_jobs_end_then_it_gets_the_trace_of_each(
        self, valkey: RedisServer, history: Engine, exporter: TraceExporter, collector: Receiver
    ) -> None:
        exporter.start()

        record(valkey, history, exporter, one_job("0.acme.00001"), one_job("0.acme.00002"), [e.submitted("0.a.00003")])

        spans = spans_at(collector)
        assert len({span.trace_id for span in spans}) == 2
        roots = [span for span in spans if span.name == "llm_request"]
        assert {span.attributes["gen_ai.request.id"] for span in roots} == {"0.acme.00001", "0.acme.00002"}
        assert {(span.start_ns, span.end_ns) for span in roots} == {
            (e.NOON_MS * 1_000_000, (e.NOON_MS + 1050) * 1_000_000)
        }
        assert service_of(collector)["service.name"] == "sluice"

    def test_when_an_end_is_recorded_again_by_another_then_its_spans_are_the_same(
        self, valkey: RedisServer, history: Engine, exporter: TraceExporter, collector: Receiver
    ) -> None:
        exporter.start()
        record(valkey, history, exporter, one_job("0.acme.00001"))
        first = spans_at(collector)
        another = TraceExporter(history, collector.url, get_log())
        another.start()

        record(valkey, history, another, [e.ended("0.acme.00001")])

        assert spans_at(collector)[len(first) :] == first

    def test_when_the_operator_names_the_service_then_it_has_that_name(
        self, valkey: RedisServer, history: Engine, collector: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", "summaries")
        named = TraceExporter(history, collector.url, get_log())
        named.start()

        record(valkey, history, named, one_job("0.acme.00001"))

        assert service_of(collector)["service.name"] == "summaries"

    def test_when_the_end_of_one_is_forged_then_it_costs_no_other_trace(
        self, valkey: RedisServer, history: Engine, exporter: TraceExporter, collector: Receiver
    ) -> None:
        forged = [e.submitted("0.evil.00001"), e.ended("0.evil.00001", at_ms=2**62)]
        exporter.start()

        record(valkey, history, exporter, forged, one_job("0.acme.00001"))

        roots = [span for span in spans_at(collector) if span.name == "llm_request"]
        assert "0.acme.00001" in {span.attributes["gen_ai.request.id"] for span in roots}
        assert exporter.num_dropped == 0

    def test_when_rows_have_prompts_then_they_are_not_read(
        self, valkey: RedisServer, history: Engine, exporter: TraceExporter, collector: Receiver
    ) -> None:
        read: list[str] = []

        def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            read.append(statement)

        listen(history, "before_cursor_execute", note)
        exporter.start()

        record(valkey, history, exporter, one_job("0.acme.00001"))

        assert spans_at(collector)
        assert [one for one in read if one.startswith("SELECT jobs.") and "jobs.prompt," in one] == []


class TestGivenACollectorThatRefuses:
    def test_when_jobs_end_then_their_rows_are_there_and_traces_are_counted_as_dropped(
        self, valkey: RedisServer, history: Engine, exporter: TraceExporter, collector: Receiver
    ) -> None:
        collector.answers += [400] * 10
        exporter.start()

        record(valkey, history, exporter, one_job("0.acme.00001"))

        assert states(history) == {"0.acme.00001": "done"}
        assert exporter.num_dropped == 1


class TestGivenMoreThanCanBeExported:
    def test_when_too_many_wait_then_further_ones_are_dropped_at_once(
        self, exporter: TraceExporter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exporting, "MAX_WAITING", 3)
        some: Sequence[Submission] = [(f"0.acme.{number:05}", e.NOON_MS) for number in range(5)]  # pyright: ignore[reportAssignmentType]  # job ids

        exporter.ended(some)

        assert exporter.num_dropped == 2


class TestGivenACollectorThatHangs:
    def test_when_the_recorder_stops_then_what_was_not_sent_is_counted_and_logged(
        self, valkey: RedisServer, history: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exporting, "FLUSH_S", 0.2)
        with socket.create_server(("127.0.0.1", 0)) as silent, capture_logs() as events:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
            exporter = TraceExporter(history, url, get_log())
            exporter.start()

            record(valkey, history, exporter, one_job("0.acme.00001"), one_job("0.acme.00002"))

        assert exporter.num_dropped == 2
        assert [event["lost"] for event in events if "lost at shutdown" in event["event"]] == [2]


class TestGivenNoEndpoint:
    def test_when_a_recorder_runs_then_nothing_that_exports_is_loaded(
        self, valkey: RedisServer, sqlite_url: str
    ) -> None:
        urls = ("--redis-url", valkey.url, "--database-url", sqlite_url)
        command = (sys.executable, "-X", "importtime", "-P", "-m", "sluice.worker", "record", "--until-eof", *urls)

        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)

        assert "recorder stopped" in ran.stdout + ran.stderr
        assert "sluice.worker.recorder.recorder" in ran.stderr
        assert "sluice.worker.traces" not in ran.stderr
        assert "opentelemetry.exporter" not in ran.stderr  # redis-py loads other parts, where they are installed
