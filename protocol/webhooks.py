"""Sign webhooks and verify them, by the scheme of standardwebhooks.com, version 1. No I/O.

There are three headers: `webhook-id` (the id of the event, the same in every attempt, so that a receiver can discard
duplicates), `webhook-timestamp` (seconds since 1970, of this attempt) and `webhook-signature` (one `v1,<base64>` per
key). The signature is the HMAC-SHA256 of `<id>.<timestamp>.<body>`.

Anyone who can verify with a key can also sign with it, so each tenant has its own keys, which are derived from those
of `worker callbacks`.
"""

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping

ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER = "webhook-id", "webhook-timestamp", "webhook-signature"
SECRET_PREFIX = "whsec_"
DERIVED_FOR = b"sluice webhooks of tenant "
"""Prefix of the tenant in the message whose HMAC is its key. No event id has this prefix."""

TOLERANCE_S = 300
"""Greatest age of a signature, in seconds, against replay."""


class BadSignature(ValueError):
    """The request was not signed with this secret, or the signature is too old."""


def tenant_secrets(secrets: str, tenant: str) -> str:
    """Return the keys for the webhooks of one tenant, for `sign`: one for each of `secrets`.

    A key reveals neither the keys of other tenants nor the key from which it is derived.

    Args:
        secrets: The keys of `worker callbacks`, as in `sign`.
        tenant: Empty for webhooks of batches, which have no tenant.

    Raises:
        ValueError: there is no key, or one is empty or not base64.
    """
    message = DERIVED_FOR + tenant.encode()
    derived = (hmac.digest(key, message, hashlib.sha256) for key in signing_keys(secrets))
    return " ".join(SECRET_PREFIX + base64.b64encode(key).decode() for key in derived)


def sign(secrets: str, *, event_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """Return the headers of one attempt.

    Args:
        secrets: One key, or several separated by spaces during a rotation; `whsec_<base64>` or plain text.
        event_id: Id of the event; must not contain a full stop.
        timestamp_s: Wall-clock time of this attempt, in seconds.
        body: The body, exactly as sent.

    Raises:
        ValueError: there is no key, or one is empty or not base64.
    """
    signatures = [f"v1,{_signature(key, event_id, timestamp_s, body)}" for key in signing_keys(secrets)]
    return {ID_HEADER: event_id, TIMESTAMP_HEADER: str(timestamp_s), SIGNATURE_HEADER: " ".join(signatures)}


def verify_webhook(
    secrets: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    now_s: float | None = None,
    tolerance_s: float = TOLERANCE_S,
) -> str:
    """Verify a webhook; returns the id of its event, which identifies duplicates.

    Args:
        secrets: As in `sign`; a signature by any of them is accepted.
        headers: The headers of the request; names in any case.
        body: The body, exactly as received.
        now_s: Wall-clock time, in seconds; default: the current time.
        tolerance_s: Greatest difference between timestamp and wall clock, in seconds.

    Raises:
        BadSignature: a header is missing, the time differs too much, or no signature is valid.
        ValueError: there is no key, or one is empty or not base64.
    """
    keys = signing_keys(secrets)
    lowered = {name.lower(): value for name, value in headers.items()}
    try:
        event_id, timestamp_s = lowered[ID_HEADER], int(lowered[TIMESTAMP_HEADER])
        signatures = lowered[SIGNATURE_HEADER].split()
    except (KeyError, ValueError) as error:
        raise BadSignature(f"a webhook header is missing or malformed: {error}") from error
    if abs((time.time() if now_s is None else now_s) - timestamp_s) > tolerance_s:
        raise BadSignature("the signature is too old, or from the future")
    for key in keys:
        expected = f"v1,{_signature(key, event_id, timestamp_s, body)}"
        if any(hmac.compare_digest(expected.encode(), signature.encode()) for signature in signatures):
            return event_id
    raise BadSignature("no signature matches this secret")


def signing_keys(secrets: str) -> list[bytes]:
    """Return the keys in `secrets`. Error messages do not contain them.

    Raises:
        ValueError: there is no key, or one is empty or not base64.
    """
    keys = [_key(secret) for secret in secrets.split()]
    if not keys:
        raise ValueError("the secret has no key")
    return keys


def _signature(key: bytes, event_id: str, timestamp_s: int, body: bytes) -> str:
    signed = f"{event_id}.{timestamp_s}.".encode() + body
    return base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def _key(secret: str) -> bytes:
    if not secret.startswith(SECRET_PREFIX):
        return secret.encode()
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a key that begins with {SECRET_PREFIX} must be base64 after it: {error}") from error
    if not key:
        raise ValueError(f"a key that begins with {SECRET_PREFIX} must not be empty after it")
    return key
