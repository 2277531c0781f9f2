"""Read the parameters of a query."""

from math import isfinite

from starlette.requests import Request

from sluice.gateway.errors import HttpError, bad_request

MAX_SECONDS = 10**9


def read_number(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    """Return a whole number of the query.

    Raises:
        HttpError: 400, it is none, or out of its range.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and least <= int(text) <= most):
        raise bad_request(f"{name} must be a whole number in [{least}, {most}]", param=name)
    return int(text)


def read_seconds(request: Request, name: str) -> float | None:
    """Return a number of seconds of the query, None if it is not given.

    Raises:
        HttpError: 400, it is none, or out of its range.
    """
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError as error:
        raise _no_seconds(name) from error
    if not (isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise _no_seconds(name)
    return seconds


def read_text(request: Request, name: str) -> str | None:
    """Return a text of the query, None if it is not given. Databases refuse NUL, which none of their names has."""
    text = request.query_params.get(name)
    return None if text is None else text.replace("\0", "?")


def _no_seconds(name: str) -> HttpError:
    return bad_request(f"{name} must be a number of seconds in [0, {MAX_SECONDS}]", param=name)
