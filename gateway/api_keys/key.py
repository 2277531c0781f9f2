"""API keys: their format, and the values that the database stores. No I/O.

A key is `sluice_<id>_<secret>`. The id is not secret: lists show it, and keys are looked up by it. The secret
has 256 random bits, so that one pass of SHA-256 hides it as well as a slow hash would.
"""

import hmac
import secrets
from dataclasses import dataclass, field
from hashlib import sha256

from sluice.producer.errors import InvalidSetting
from sluice.protocol.job_ids import check_tenant

PREFIX = "sluice"
ID_BYTES, SECRET_BYTES = 6, 32
SCOPES = ("submit", "read", "control", "admin", "metrics")
MAX_LIMIT = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key without its secret.

    Raises:
        InvalidSetting: a scope is unknown, or a limit is out of its range.
        InvalidJob: the tenant's name cannot be part of a Redis key.
    """

    id: str
    digest: str = field(repr=False)
    """SHA-256 of the secret, in hexadecimal."""

    tenant: str
    scopes: tuple[str, ...] = ("submit", "read")
    rpm: int | None = None
    """Most requests a minute; None: no limit."""

    tpm: int | None = None
    """Most tokens a minute, of prompts and reserved outputs; None: no limit."""

    created_ms: int
    expires_ms: int | None = None
    revoked_ms: int | None = None
    last_used_ms: int | None = None

    def __post_init__(self) -> None:
        check_tenant(self.tenant)
        if unknown := sorted({*self.scopes} - {*SCOPES}):
            raise InvalidSetting(f"unknown scope {unknown[0]!r}; scopes are {', '.join(SCOPES)}")
        for name, limit in (("rpm", self.rpm), ("tpm", self.tpm)):
            if limit is not None and not 1 <= limit <= MAX_LIMIT:
                raise InvalidSetting(f"{name} must be in [1, {MAX_LIMIT}], got {limit}")

    def is_active(self, now_ms: int) -> bool:
        """Return whether the key is neither revoked nor expired."""
        return self.revoked_ms is None and (self.expires_ms is None or now_ms < self.expires_ms)


def new_secret() -> tuple[str, str, str]:
    """Create a random key; return its text, its id and the digest of its secret."""
    key_id, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    return f"{PREFIX}_{key_id}_{secret}", key_id, _digest(secret)


def split_key(text: str) -> tuple[str, str]:
    """Return the id and the secret of a key's text; both are empty if the text is not a key."""
    prefix, _, rest = text.partition("_")
    key_id, _, secret = rest.partition("_")
    return (key_id, secret) if prefix == PREFIX else ("", "")


def is_secret_of(secret: str, digest: str) -> bool:
    """Return whether a secret has this digest. The time that this takes depends on neither."""
    return hmac.compare_digest(_digest(secret), digest)


def _digest(secret: str) -> str:
    return sha256(secret.encode(errors="replace")).hexdigest()
