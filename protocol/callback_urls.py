"""Validation of callback URLs, for submits, for batches, and for `worker callbacks` before it sends.

The address that a URL resolves to is checked when the callback is sent (`worker/callbacks/webhooks.py`).
"""

from urllib.parse import SplitResult, urlsplit

from sluice.protocol import limits


def read_callback_url(url: str) -> SplitResult:
    """Parse a callback's URL.

    Raises:
        ValueError: the URL is not valid; the message continues a sentence that begins with the URL.
    """
    if len(url) > limits.MAX_URL_CHARS:
        raise ValueError(f"must have at most {limits.MAX_URL_CHARS} characters")
    if not url.isprintable():
        raise ValueError("must not contain control characters")
    try:
        target = urlsplit(url)
        port = target.port
        (target.hostname or "").encode("idna")
    except ValueError as error:  # a UnicodeError, too
        raise ValueError(f"must be a URL, which {url[:80]!r} is not: {error}") from None
    if target.scheme not in ("http", "https") or not target.hostname or " " in target.netloc or port == 0:
        raise ValueError("must begin with http:// or https:// and name a host")
    if target.username is not None:
        raise ValueError("must not contain a user name or password; webhooks are signed instead")
    return target


def problem_of(url: object) -> str | None:
    """Return why a callback's URL is not valid, or None."""
    if not isinstance(url, str):
        return f"must be text, got {type(url).__name__}"
    try:
        read_callback_url(url)
    except ValueError as error:
        return str(error)
    return None
