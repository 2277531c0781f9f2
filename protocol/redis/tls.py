"""TLS to the queue's server: the files that a URL names, and errors of refused certificates."""

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Options of a URL: the trusted certificate authorities, the client's certificate, and its key."""

HOW = f"Check {', '.join(FILES)} in the URL, and the server's own certificate."

_REFUSED = (
    "CERTIFICATE_VERIFY_FAILED",
    "ALERT_CERTIFICATE",
    "ALERT_UNKNOWN_CA",
    "ALERT_BAD_CERTIFICATE",
    "WRONG_VERSION",
)
_HUNG_UP = ("EOF occurred in violation of protocol", "Connection reset", "Broken pipe", "Connection closed")


def is_refused(error: BaseException) -> bool:
    """Return whether an error means that one side refuses the other's certificate."""
    return any(word in str(error) for word in _REFUSED)


def may_be_refused(error: BaseException, url: str) -> bool:
    """As `is_refused`; also if the server of a TLS URL closed the connection: it may require a client certificate."""
    has_hung_up = url.startswith("rediss") and any(word in str(error) for word in _HUNG_UP)
    return has_hung_up or is_refused(error)


def check_files(url: str) -> None:
    """Check that the files named by the URL can be read.

    Raises:
        ValueError: a file cannot be read.
    """
    named = [(name, Path(value)) for name, value in parse_qsl(urlsplit(url).query) if name in FILES]
    if problems := [f"{name}: {problem}" for name, path in named if (problem := _problem_of(path))]:
        raise ValueError("; ".join(problems))


def _problem_of(path: Path) -> str | None:
    try:
        path.open("rb").close()
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    return None
