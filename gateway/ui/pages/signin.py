"""Sign in with an API key, and sign out."""

import re
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sluice.gateway.access import Caller
from sluice.gateway.api_keys.key import ID_BYTES, split_key
from sluice.gateway.audit import AuditLog
from sluice.gateway.keyring import Keyring
from sluice.gateway.threads import SQL
from sluice.gateway.ui.frame import SIGN_IN, Form, Frame, is_own_path, read_form, render
from sluice.gateway.ui.sessions import LIFE_S, Sessions
from sluice.gateway.ui.visitors import COOKIE, Visitor, Visitors, check_origin

HOME = "/ui/"
KEY_ID = re.compile(f"[0-9a-f]{{{2 * ID_BYTES}}}")
MAX_KEY_CHARS = 500
MAX_FORM_BYTES = 16 * 1024
"""Anyone may send this form, and it is decoded on the event loop."""


class SignIn:
    """The form that takes a key, and the button to sign out."""

    def __init__(self, frame: Frame, visitors: Visitors, keyring: Keyring, sessions: Sessions, audit: AuditLog) -> None:
        self._frame, self._visitors, self._keyring = frame, visitors, keyring
        self._sessions, self._audit = sessions, audit

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        yield self._frame.open(SIGN_IN, self._show)
        yield self._frame.open(SIGN_IN, self._sign_in, "POST")
        yield self._frame.action("/ui/sign-out", self._sign_out, scope=None)

    async def _show(self, request: Request) -> Response:
        if await self._visitors.of(request) is not None:
            return RedirectResponse(HOME, 303)
        return render(request, "sign_in.html", back=request.query_params.get("next", ""), is_wrong=False)

    async def _sign_in(self, request: Request) -> Response:
        check_origin(request)
        form = await read_form(request, MAX_FORM_BYTES)
        text, back = form.get("key", [""])[0].strip(), form.get("next", [""])[0]
        key = self._keyring.key_of(text) if 0 < len(text) <= MAX_KEY_CHARS else None
        if key is None:
            await self._audit.refused_sign_in(request.client.host if request.client else "", _id_in(text))
            return render(request, "sign_in.html", status=401, back=back, is_wrong=True)
        async with self._audit.action(Caller(key), "sign_in", key.id):
            token = await SQL.run(self._sessions.begin, key.id)
        response = RedirectResponse(back if is_own_path(back) else HOME, 303)
        # From the origin, which was checked, because a proxy in front may terminate TLS.
        is_secure = request.headers["origin"].lower().startswith("https:")
        response.set_cookie(
            COOKIE, token, max_age=LIFE_S, path="/ui", secure=is_secure, httponly=True, samesite="strict"
        )
        return response

    async def _sign_out(self, _request: Request, visitor: Visitor, _form: Form) -> Response:
        if visitor.token is not None and visitor.caller.key is not None:
            async with self._audit.action(visitor.caller, "sign_out", visitor.caller.key.id):
                await SQL.run(self._sessions.end, visitor.token)
        response = RedirectResponse(SIGN_IN, 303)
        response.delete_cookie(COOKIE, path="/ui", httponly=True, samesite="strict")
        return response


def _id_in(text: str) -> str | None:
    """Return the public part of a key; None if the text is not a key."""
    key_id = split_key(text)[0]
    return key_id if KEY_ID.fullmatch(key_id) else None
