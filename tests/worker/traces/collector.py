"""A collector of traces: a real HTTP server, whose requests are read by OpenTelemetry's own messages."""

from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.worker.callbacks.receiver import Receiver


@dataclass(frozen=True)
class ReceivedSpan:
    """One span, as it was on the wire."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    is_error: bool


def spans_at(collector: Receiver) -> list[ReceivedSpan]:
    """All spans that it got."""
    found: list[ReceivedSpan] = []
    for _, body in collector.got:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                found += [_read(span) for span in scope.spans]
    return found


def service_of(collector: Receiver) -> dict[str, object]:
    """The attributes of the resource of its first request."""
    request = ExportTraceServiceRequest.FromString(collector.got[0][1])
    return _attributes(request.resource_spans[0].resource.attributes)


def _read(span: Any) -> ReceivedSpan:  # Any: protobuf's messages have no types
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        is_error=span.status.code == 2,
    )


def _attributes(pairs: Any) -> dict[str, object]:  # Any: as above
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
