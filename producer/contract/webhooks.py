"""How a webhook is signed, and how its receiver checks it: the scheme of standardwebhooks.com, version 1.

Knows no network. Three headers: `webhook-id` (the event's id: the same in every try, so that a receiver can drop what
it has seen), `webhook-timestamp` (seconds since 1970, of this try) and `webhook-signature` (one `v1,<base64>` for each
key in use). Signed is `<id>.<timestamp>.<body>` with HMAC-SHA256.
"""

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping

ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER = "webhook-id", "webhook-timestamp", "webhook-signature"
SECRET_PREFIX = "whsec_"
TOLERANCE_S = 300
"""A signature older than this is refused: someone may be playing it again."""


class BadSignature(ValueError):
    """The request was not signed with this secret, or not lately."""


def sign(secrets: str, *, event_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """The headers of one try.

    Args:
        secrets: One key, or several with spaces between while they are being exchanged; `whsec_<base64>` or plain text.
        event_id: Has no full stop in it, since those separate what is signed.
        timestamp_s: Wall clock of this try.
        body: What is sent.
    """
    signatures = [f"v1,{_signature(secret, event_id, timestamp_s, body)}" for secret in secrets.split()]
    return {ID_HEADER: event_id, TIMESTAMP_HEADER: str(timestamp_s), SIGNATURE_HEADER: " ".join(signatures)}


def verify(
    secrets: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    now_s: float | None = None,
    tolerance_s: float = TOLERANCE_S,
) -> str:
    """Check a request that claims to be a webhook; give its event's id, by which repeats are known.

    Args:
        secrets: As in `sign`; any of them may have signed.
        headers: Of the request; names in any case.
        body: Exactly as received.
        now_s: Wall clock; now if not given.
        tolerance_s: How old, or how far ahead, the signature may be.

    Raises:
        BadSignature: a header is missing, the time is too far away, or no signature is right.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    try:
        event_id, timestamp_s = lowered[ID_HEADER], int(lowered[TIMESTAMP_HEADER])
        given = lowered[SIGNATURE_HEADER].split()
    except (KeyError, ValueError) as error:
        raise BadSignature(f"a webhook header is missing or malformed: {error}") from error
    if abs((time.time() if now_s is None else now_s) - timestamp_s) > tolerance_s:
        raise BadSignature("the signature is too old, or from the future")
    for secret in secrets.split():
        expected = f"v1,{_signature(secret, event_id, timestamp_s, body)}"
        if any(hmac.compare_digest(expected.encode(), signature.encode()) for signature in given):
            return event_id
    raise BadSignature("no signature was made with this secret")


def _signature(secret: str, event_id: str, timestamp_s: int, body: bytes) -> str:
    signed = f"{event_id}.{timestamp_s}.".encode() + body
    return base64.b64encode(hmac.digest(_key(secret), signed, hashlib.sha256)).decode()


def _key(secret: str) -> bytes:
    if not secret.startswith(SECRET_PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a secret that begins with {SECRET_PREFIX} goes on in base64: {error}") from error
