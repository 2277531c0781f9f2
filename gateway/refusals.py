"""Errors for requests beyond a bound, counted for the metrics of this gateway process."""

from collections.abc import Iterator, Mapping
from http import HTTPStatus

from sluice.gateway.errors import CALLER, LIMIT, SERVER, HttpError
from sluice.protocol.bounds import BOUNDS, Bound
from sluice.protocol.metrics import METRICS, text_of

REFUSED: dict[str, int] = {bound.name: 0 for bound in BOUNDS if bound.metric == "sluice_gateway_refused_total"}
"""Refusals by the name of their bound."""

KINDS = {HTTPStatus.TOO_MANY_REQUESTS: LIMIT, HTTPStatus.SERVICE_UNAVAILABLE: SERVER}


def count(bound: Bound) -> None:
    """Count a refusal without a response."""
    REFUSED[bound.name] += 1


def refusal(
    bound: Bound,
    message: str,
    *,
    retry_after_s: int = 1,
    headers: Mapping[str, str] | None = None,
    param: str | None = None,
) -> HttpError:
    """Return the error of a request beyond a bound, and count it."""
    count(bound)
    status = HTTPStatus(bound.status or HTTPStatus.SERVICE_UNAVAILABLE)
    when = {"retry-after": str(retry_after_s)} if status in KINDS else {}
    kind = KINDS.get(status, CALLER)
    return HttpError(status, kind, message, bound.code, param=param, headers={**(headers or {}), **when})


def refusal_lines() -> Iterator[str]:
    """Return the lines of the metric, in the text format of Prometheus."""
    return text_of(METRICS["gateway_refused"], [((name,), number) for name, number in REFUSED.items()])
