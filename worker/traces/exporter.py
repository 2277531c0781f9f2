"""Export the traces of ended jobs over OTLP, on a thread of its own. The recorder never waits for it.

An unreachable collector costs traces, never rows: at most `MAX_WAITING` jobs wait, and traces that are late are
dropped and counted. Headers, certificates and timeouts are those of OpenTelemetry's variables (`OTEL_EXPORTER_OTLP_…`),
the service's name is `OTEL_SERVICE_NAME`.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from sqlalchemy.engine import Engine

from sluice.history.rows import Submission
from sluice.history.tables import attempts, jobs, of_submissions
from sluice.version import installed_version
from sluice.worker.log import Log
from sluice.worker.stopping import FLUSH_S
from sluice.worker.traces.spans import JobSpan, Row, spans_of

MAX_WAITING = 10_000
"""Ended jobs whose spans are not made yet."""

MAX_JOBS = 200
"""In one export."""

_NS = 1_000_000
_COLUMNS = tuple(column for column in jobs.c if column.name not in ("prompt", "asked"))
"""Prompts are not exported, and may be megabytes each."""


class TraceExporter:
    """The exporter's thread. A component: start, stop."""

    def __init__(self, engine: Engine, endpoint: str, log: Log) -> None:
        """Prepare it. `endpoint` is the whole URL, as `http://collector:4318/v1/traces`."""
        self._engine, self._log = engine, log
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._resource = _resource()
        self._scope = InstrumentationScope("sluice.worker.traces", installed_version())
        self._waiting: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._is_failing = self._is_over = False
        self._num_given = self._num_tried = 0
        self.num_dropped = 0
        """Jobs whose traces were not sent."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ended(self, submissions: Iterable[Submission]) -> None:
        """Export these jobs, whose ends are in the history now. Never blocks."""
        for submission in submissions:
            if self._waiting.qsize() < MAX_WAITING:
                self._num_given += 1
                self._waiting.put(submission)
            else:
                self._dropped(1, "more jobs end than can be exported")

    def stop(self) -> None:
        """Send waiting traces, for at most `FLUSH_S`."""
        self._waiting.put(None)
        self._thread.join(FLUSH_S)
        num_lost = self._num_given - self._num_tried
        self._is_over = True
        self._exporter.shutdown()
        if num_lost:
            self.num_dropped += num_lost
            self._log.warning("traces are lost at shutdown: the collector is too slow", lost=num_lost, after_s=FLUSH_S)

    def _run(self) -> None:
        is_open = True
        while is_open:
            submissions, is_open = self._next()
            if submissions:
                self._export(submissions)
                self._num_tried += len(submissions)

    def _next(self) -> tuple[list[Submission], bool]:
        """Wait for ended jobs. Return them, and whether more may come."""
        submissions: list[Submission] = []
        job = self._waiting.get()
        while job is not None:
            submissions.append(job)
            if len(submissions) == MAX_JOBS or self._waiting.empty():
                return submissions, True
            job = self._waiting.get()
        return submissions, False

    def _export(self, submissions: Sequence[Submission]) -> None:
        try:
            rows = read_rows(self._engine, submissions)
            spans = [self._readable(span) for job, claims in rows for span in spans_of(job, claims)]
            is_sent = not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001  # whatever it is, later traces are exported
            self._dropped(len(submissions), str(error))
            return
        if not is_sent:
            self._dropped(len(submissions), "the collector does not take them")
        elif self._is_failing:
            self._is_failing = False
            self._log.info("traces are sent again", dropped=self.num_dropped)

    def _dropped(self, count: int, why: str) -> None:
        if self._is_over:
            return  # they are counted
        self.num_dropped += count
        if not self._is_failing:
            self._is_failing = True
            self._log.warning("traces are dropped", error=why)

    def _readable(self, span: JobSpan) -> ReadableSpan:
        def context(span_id: int, *, is_remote: bool) -> SpanContext:
            return SpanContext(span.trace_id, span_id, is_remote=is_remote, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        parent_id = span.parent_id
        return ReadableSpan(
            name=span.name,
            context=context(span.span_id, is_remote=False),
            parent=None if parent_id is None else context(parent_id, is_remote=span.is_remote_child),
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(event.name, event.attributes, event.at_ms * _NS) for event in span.events],
            kind=SpanKind.SERVER if span.name == "llm_request" else SpanKind.INTERNAL,
            instrumentation_scope=self._scope,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.OK),
            start_time=span.start_ms * _NS,
            end_time=span.end_ms * _NS,
        )


def _resource() -> Resource:
    """Describe this service, by OpenTelemetry's variables where they do."""
    resource = Resource.create({SERVICE_VERSION: installed_version()})
    if not str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return resource
    return resource.merge(Resource({SERVICE_NAME: "sluice"}))


def read_rows(engine: Engine, submissions: Sequence[Submission]) -> list[tuple[Row, list[Row]]]:
    """Read the rows of jobs and of their attempts."""
    claims: defaultdict[Submission, list[Row]] = defaultdict(list)
    with engine.connect() as connection:
        of_jobs = connection.execute(sa.select(*_COLUMNS).where(of_submissions(jobs, submissions)))
        rows: list[Mapping[str, object]] = [dict(row) for row in of_jobs.mappings()]
        for row in connection.execute(sa.select(attempts).where(of_submissions(attempts, submissions))).mappings():
            claims[row["job_id"], row["submitted_ms"]].append(dict(row))
    return [(row, claims[row["id"], row["submitted_ms"]]) for row in rows]  # pyright: ignore[reportArgumentType]  # columns of a table
