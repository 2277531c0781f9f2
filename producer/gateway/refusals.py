"""Errors for requests beyond a bound, counted for the metrics of this gateway process."""

from collections.abc import Iterator, Mapping
from http import HTTPStatus

from sluice.producer.contract.bounds import BOUNDS, Bound
from sluice.producer.gateway.errors import CALLER, LIMIT, SERVER, HttpError

REFUSED: dict[str, int] = {bound.name: 0 for bound in BOUNDS if bound.metric == "sluice_gateway_refused_total"}
"""Refusals by the name of their bound."""

KINDS = {HTTPStatus.TOO_MANY_REQUESTS: LIMIT, HTTPStatus.SERVICE_UNAVAILABLE: SERVER}
RETRIED = tuple(KINDS)


def refusal(
    bound: Bound,
    message: str,
    *,
    retry_after_s: int = 1,
    headers: Mapping[str, str] | None = None,
    param: str | None = None,
) -> HttpError:
    """Return the error of a request beyond a bound, and count it."""
    REFUSED[bound.name] += 1
    when = {"retry-after": str(retry_after_s)} if bound.status in RETRIED else {}
    kind = KINDS.get(HTTPStatus(bound.status), CALLER)
    return HttpError(bound.status, kind, message, bound.code, param=param, headers={**(headers or {}), **when})


def refusal_lines() -> Iterator[str]:
    """Yield the lines of the metric, in the text format of Prometheus."""
    yield "# HELP sluice_gateway_refused_total Requests that were refused, by the bound that they exceeded.\n"
    yield "# TYPE sluice_gateway_refused_total counter\n"
    for name, count in REFUSED.items():
        yield f'sluice_gateway_refused_total{{bound="{name}"}} {count}\n'
