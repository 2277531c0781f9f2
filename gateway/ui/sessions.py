"""Sign-ins: random tokens in cookies. The database stores their hashes, each with the id of an API key."""

from hashlib import sha256
from secrets import token_urlsafe

import sqlalchemy as sa

from sluice.gateway.tables.database import Database
from sluice.history.tables import page_sessions
from sluice.protocol.clock import wall_ms

LIFE_S = 12 * 3600
"""How long a sign-in is valid, in seconds."""


class Sessions:
    """The sign-ins of all gateways of one database. Methods block; thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, key_id: str) -> str:
        """Sign in with a key; return the token for the cookie. Also deletes expired sign-ins."""
        token, now_ms = token_urlsafe(32), wall_ms()
        row = {"digest": digest_of(token), "key_id": key_id, "created_ms": now_ms, "expires_ms": now_ms + LIFE_S * 1000}
        with self._database.transaction() as connection:
            connection.execute(page_sessions.delete().where(page_sessions.c.expires_ms <= now_ms))
            connection.execute(page_sessions.insert().values(**row))
        return token

    def key_id_of(self, token: str) -> str | None:
        """Return the id of the session's key; None if the session does not exist or has expired."""
        conditions = (page_sessions.c.digest == digest_of(token), page_sessions.c.expires_ms > wall_ms())
        with self._database.reading() as connection:
            return connection.execute(sa.select(page_sessions.c.key_id).where(*conditions)).scalar_one_or_none()

    def end(self, token: str) -> None:
        """Sign out."""
        with self._database.transaction() as connection:
            connection.execute(page_sessions.delete().where(page_sessions.c.digest == digest_of(token)))


def digest_of(token: str) -> str:
    """Return the stored hash of a token. A token has 256 random bits, so one pass of SHA-256 is enough."""
    return sha256(token.encode(errors="replace")).hexdigest()
