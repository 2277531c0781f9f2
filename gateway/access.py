"""Authentication: requests need an API key, except from this machine while the gateway has no keys."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.gateway.api_keys.key import PREFIX, ApiKey
from sluice.gateway.arrival.shares import share_in
from sluice.gateway.errors import CALLER, HttpError, bad_request
from sluice.gateway.keyring import Keyring
from sluice.gateway.settings import is_loopback

PUBLIC = ("/livez", "/readyz")
"""Paths that need no key."""

PAGE = "/ui"
"""Path of the page, whose visitors sign in."""

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    key: ApiKey | None = None
    """None if the gateway has no keys."""

    @property
    def tenant(self) -> str:
        """The tenant of the caller's jobs."""
        return "default" if self.key is None else self.key.tenant

    @property
    def facts(self) -> dict[str, str]:
        """Fields for log lines."""
        return {} if self.key is None else {"tenant": self.key.tenant, "key_id": self.key.id}

    def may(self, scope: str) -> bool:
        """Return whether the caller has a scope. If the gateway has no keys, every caller has all scopes."""
        return self.key is None or scope in self.key.scopes

    def check_scope(self, scope: str) -> None:
        """Check that the caller has a scope.

        Raises:
            HttpError: 403, the key lacks the scope.
        """
        if not self.may(scope):
            raise HttpError(403, CALLER, f"the API key lacks the scope {scope!r}", "missing_scope")


class Access:
    """Middleware that finds the caller of each request, or refuses it.

    Args:
        app: The application behind it.
        keyring: The keys.
        is_loopback: Whether requests need no key until the first key is found.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, *, is_loopback: bool) -> None:
        self._app, self._keyring, self._is_loopback = app, keyring, is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        answer: ASGIApp = self._app
        if scope["type"] != "lifespan":
            try:
                caller = self._caller(scope)
                if caller is not None:
                    scope.setdefault("state", {}).update(caller=caller, **caller.facts)
                    _count(scope, caller)
            except HttpError as refusal:
                answer = refusal.response
        await answer(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        """Return the sender of a request; None for the page, which has its own sign-in."""
        headers = Headers(scope=scope)
        is_open = self._is_loopback and not self._keyring.is_required
        if is_open:
            _check_loopback(headers)
        if scope["path"] in PUBLIC:
            return Caller()
        if is_open:
            if _has_our_key(headers):
                raise _invalid()  # the database with its key may be lost
            return Caller()
        if is_page(scope["path"]):
            return None
        key = self._keyring.key_of(_bearer(headers))
        if key is None:
            raise _invalid()
        return Caller(key)


def _count(scope: Scope, caller: Caller) -> None:
    """Count a request towards the bounds of its key and tenant.

    Raises:
        HttpError: 429, the tenant uses too much memory, or the key has read too much.
    """
    share = share_in(scope)
    if share is not None and caller.key is not None:
        share.belong_to(caller.key)


def is_page(path: str) -> bool:
    """Return whether a path is one of the page, or leads to it."""
    return path in ("/", PAGE) or path.startswith(f"{PAGE}/")


def caller_of(request: Request) -> Caller:
    """Return the caller that `Access` found."""
    return request.state.caller


def needs(scope: str, handler: Handler) -> Handler:
    """Return a handler that refuses callers without a scope."""

    async def checked(request: Request) -> Response:
        caller_of(request).check_scope(scope)
        return await handler(request)

    return checked


def _bearer(headers: Headers) -> str:
    values = headers.getlist("authorization")
    kind, _, text = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    if kind.lower() != "bearer" or not text.strip():
        raise _unauthorized("give an API key: Authorization: Bearer KEY", "missing_api_key")
    return text.strip()


def _has_our_key(headers: Headers) -> bool:
    texts = (value.partition(" ")[2].strip() for value in headers.getlist("authorization"))
    return any(text.startswith(f"{PREFIX}_") for text in texts)


def _invalid() -> HttpError:
    # One message for all cases, so that it does not reveal which keys exist.
    return _unauthorized("the API key is unknown, revoked or expired", "invalid_api_key")


def _unauthorized(message: str, code: str) -> HttpError:
    return HttpError(401, CALLER, message, code, headers={"www-authenticate": "Bearer"})


def _check_loopback(headers: Headers) -> None:
    """Check that Host, and Origin if there is one, are loopback names: a page that the user opens must not call.

    It reaches a loopback server through its own host name (DNS rebinding), or from a foreign origin.

    Raises:
        HttpError: one of them is not.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if not is_loopback(_host_of(f"//{host}")):
        raise bad_request(f"Host must be a loopback name, got {host!r}", code="host_refused", status=421)
    if origin is not None and not is_loopback(_host_of(origin)):
        raise bad_request(f"requests from {origin!r} are refused", code="origin_refused", status=403)


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
