"""The common frame of all pages: sign-in, scopes, CSRF protection, security headers and error pages."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from sluice.gateway.arrival.shares import share_of
from sluice.gateway.errors import HttpError, bad_request, error_of
from sluice.gateway.ui import templates
from sluice.gateway.ui.visitors import Visitor, Visitors, check_form
from sluice.producer.errors import HistoryUnavailable, ProducerError
from sluice.protocol.openai_format.requests import RequestRefused

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    # Browsers send a form's Origin only to a site that may get a Referer.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
SIGN_IN = "/ui/sign-in"
EVENTS = "text/event-stream"
MAX_FORM_BYTES, MAX_FIELDS = 4 * 1024 * 1024, 5000
TITLES: Mapping[int, str] = {
    403: "Not allowed",
    404: "Not found",
    409: "Not possible now",
    429: "Too many at once",
    503: "Not available now",
}

Form = Mapping[str, list[str]]
Refusal = HttpError | RequestRefused | ProducerError | HTTPException
Page = Callable[[Request, Visitor], Awaitable[Response]]
Action = Callable[[Request, Visitor, Form], Awaitable[Response]]
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NavigationLink:
    """An entry of the navigation."""

    path: str
    title: str
    scope: str


NAVIGATION = (
    NavigationLink("/ui/", "Overview", "read"),
    NavigationLink("/ui/jobs", "Jobs", "read"),
    NavigationLink("/ui/batches", "Batches", "read"),
    NavigationLink("/ui/dead", "Dead set", "read"),
    NavigationLink("/ui/schedules", "Schedules", "read"),
    NavigationLink("/ui/tenants", "Tenants", "read"),
    NavigationLink("/ui/try", "Try it", "submit"),
)


class Frame:
    """The frame of each page: authentication, error handling and headers."""

    def __init__(self, visitors: Visitors) -> None:
        self._visitors = visitors

    def page(self, path: str, handler: Page, *, scope: str = "read") -> Route:
        """Return the route of a page without changes."""

        async def answer(request: Request) -> Response:
            visitor = await self._visitors.of(request)
            if visitor is None:
                return _to_sign_in(request)
            _begin(request, visitor)
            visitor.caller.check_scope(scope)
            return await handler(request, visitor)

        return Route(path, self._guarded(answer), methods=["GET"])

    def action(self, path: str, handler: Action, *, scope: str | None) -> Route:
        """Return the route of a form that makes changes. `scope`: None: every visitor may send it."""

        async def answer(request: Request) -> Response:
            visitor = await self._visitors.of(request)
            if visitor is None:
                return _to_sign_in(request)
            _begin(request, visitor)
            form = await read_form(request)
            check_form(request, visitor, form.get("csrf", [""])[0])
            if scope is not None:
                visitor.caller.check_scope(scope)
            return await handler(request, visitor, form)

        return Route(path, self._guarded(answer), methods=["POST"])

    def open(self, path: str, handler: Callable[[Request], Awaitable[Response]], method: str = "GET") -> Route:
        """Return a route that needs no sign-in."""
        return Route(path, self._guarded(handler), methods=[method])

    def is_still_in(self, visitor: Visitor) -> bool:
        """Return whether a visitor may continue to read a live stream."""
        return self._visitors.is_still_in(visitor)

    async def has_session(self, visitor: Visitor) -> bool:
        """Return whether a visitor is still signed in."""
        return await self._visitors.has_session(visitor)

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                response = await answer(request)
            except ClientDisconnect:
                raise  # no client would read a response
            except HistoryUnavailable:
                response = render(request, "no_history.html", status=503)
            except (HTTPException, HttpError, RequestRefused, ProducerError) as error:
                response = _error_page(request, error)
            except Exception:
                LOG.exception("A page failed.")
                response = _error_page(request, HttpError(500, "", "the gateway failed; its log has the cause"))
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return guarded


def render(request: Request, template: str, *, status: int = 200, **values: object) -> Response:
    """Render a page for the visitor of a request."""
    visitor: Visitor | None = getattr(request.state, "visitor", None)
    links = [link for link in NAVIGATION if visitor is not None and visitor.may(link.scope)]
    here = max((link.path for link in links if request.url.path.startswith(link.path)), key=len, default="")
    confirmation = CONFIRMATIONS.get(request.query_params.get("said", ""))
    html = templates.fragment(template, visitor=visitor, links=links, here=here, confirmation=confirmation, **values)
    return HTMLResponse(html, status)


CONFIRMATIONS: dict[str, tuple[str, str]] = {}
"""Confirmations of changes: kind and sentence, by the word in the page's URL."""


def after(path: str, change: str) -> Response:
    """Redirect to a page after a change, which the page confirms."""
    return RedirectResponse(f"{path}{'&' if '?' in path else '?'}said={change}", 303)


async def read_form(request: Request, max_bytes: int = MAX_FORM_BYTES) -> Form:
    """Read the fields of a form. Browsers send each end of a line as CR LF; the text has LF, as it was written.

    Raises:
        HttpError: the body is too large, or not a form; or all requests use too much memory.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise bad_request("a form is expected", status=415)
    body, held = bytearray(), share_of(request)
    async for piece in request.stream():
        held.take(len(piece))
        body += piece
        if len(body) > max_bytes:
            raise bad_request(f"the form is larger than {max_bytes} bytes", status=413)
    form: dict[str, list[str]] = {}
    try:
        for name, value in parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict"):
            form.setdefault(name, []).append(value.replace("\r\n", "\n"))
    except ValueError as error:
        raise bad_request("the form cannot be read") from error
    return form


def is_own_path(path: str) -> bool:
    """Return whether a path is one of our pages."""
    return path.startswith("/ui/") and path.isascii() and path.isprintable() and "\\" not in path and "//" not in path


def _begin(request: Request, visitor: Visitor) -> None:
    """Count a request of a signed-in visitor towards the bounds of its key and tenant.

    Raises:
        HttpError: 429, the visitor's tenant uses too much memory, or the key has read too much.
    """
    request.state.visitor = visitor
    if visitor.caller.key is not None:
        share_of(request).belong_to(visitor.caller.key)


def _to_sign_in(request: Request) -> Response:
    if EVENTS in request.headers.get("accept", ""):
        return Response(status_code=401)
    path = request.url.path
    back = f"?next={quote(path)}" if request.method == "GET" and is_own_path(path) and path != "/ui/" else ""
    return RedirectResponse(f"{SIGN_IN}{back}", 303)


def readable(error: Refusal) -> HttpError:
    """Return an error with its status, and a message without server addresses."""
    return error if isinstance(error, HttpError) else error_of(error)


def _error_page(request: Request, refusal: Refusal) -> Response:
    error = readable(refusal)
    title = TITLES.get(error.status, "That did not work")
    response = render(request, "error.html", status=error.status, title=title, message=error.message)
    response.headers.update({name: value for name, value in error.headers.items() if name == "retry-after"})
    return response
