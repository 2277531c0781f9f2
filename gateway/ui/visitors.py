"""Visitors of the page: those with a session of an API key; if the gateway has no keys, anyone on this machine.

A session is valid only while its key is active: each request, and each check of a live stream, asks the keyring.
"""

import hmac
from dataclasses import dataclass
from hashlib import sha256
from secrets import token_urlsafe
from urllib.parse import urlsplit

from starlette.requests import Request

from sluice.gateway.access import Caller
from sluice.gateway.errors import CALLER, HttpError
from sluice.gateway.keyring import Keyring
from sluice.gateway.threads import SQL
from sluice.gateway.ui.sessions import Sessions
from sluice.producer.errors import HistoryUnavailable

COOKIE = "sluice_session"
MAX_TOKEN_CHARS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """A visitor of a page."""

    caller: Caller
    csrf: str
    """The CSRF token that forms must send with each change."""

    token: str | None = None
    """The token of the session; None if the gateway has no keys."""

    @property
    def tenant(self) -> str | None:
        """The only tenant whose jobs and batches are shown; None, if the gateway has no keys: all of them."""
        return None if self.caller.key is None else self.caller.key.tenant

    def may(self, scope: str) -> bool:
        """Return whether the visitor has a scope."""
        return self.caller.key is None or scope in self.caller.key.scopes


class Visitors:
    """The visitors of a gateway.

    Args:
        keyring: The keys.
        sessions: The sign-ins.
    """

    def __init__(self, keyring: Keyring, sessions: Sessions) -> None:
        self._keyring, self._sessions = keyring, sessions
        self._open_csrf = token_urlsafe(32)

    async def of(self, request: Request) -> Visitor | None:
        """Return the sender of a request; None if not signed in.

        Raises:
            HttpError, HistoryUnavailable: 503, keys or sessions cannot be read.
        """
        caller: Caller | None = getattr(request.state, "caller", None)
        if caller is not None:
            return Visitor(caller=caller, csrf=self._open_csrf)
        token = request.cookies.get(COOKIE, "")
        if not 0 < len(token) <= MAX_TOKEN_CHARS:
            return None
        key_id = await SQL.run(self._sessions.key_id_of, token)
        key = None if key_id is None else self._keyring.active_key(key_id)
        return None if key is None else Visitor(caller=Caller(key), csrf=_csrf_of(token), token=token)

    def is_still_in(self, visitor: Visitor) -> bool:
        """Return whether the key of a visitor is still active."""
        key = visitor.caller.key
        if key is None:
            return not self._keyring.is_required
        return self._keyring.active_key(key.id) is not None

    async def has_session(self, visitor: Visitor) -> bool:
        """Return whether the visitor's session exists and has not expired.

        While the database is unreachable, it counts as valid as long as the keyring accepts keys.
        """
        if visitor.token is None:
            return True
        try:
            return await SQL.run(self._sessions.key_id_of, visitor.token) is not None
        except HistoryUnavailable:
            return True


def check_form(request: Request, visitor: Visitor, token: str) -> None:
    """Check that a change was requested from one of our pages.

    Raises:
        HttpError: 403, the form comes from another site, or its token does not belong to the session.
    """
    check_origin(request)
    if not hmac.compare_digest(token.encode(), visitor.csrf.encode()):
        raise HttpError(
            403, CALLER, "the form does not belong to this session: go back, reload the page and try again", "csrf"
        )


def check_origin(request: Request) -> None:
    """Check that a form was sent from one of our pages: all browsers send the Origin of a POST.

    Raises:
        HttpError: 403, the form comes from another site.
    """
    origin, host = request.headers.get("origin", ""), request.headers.get("host", "")
    try:
        is_ours = urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        is_ours = False
    if not is_ours or request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise HttpError(403, CALLER, "forms are accepted from pages of this gateway only", "origin_refused")


def _csrf_of(token: str) -> str:
    """Return the CSRF token of a session, which does not reveal the cookie."""
    return hmac.new(token.encode(errors="replace"), b"csrf", sha256).hexdigest()
