"""The options of a URL of the queue's server: whether each is served, ignored or refused. No I/O.

redis-py accepts many more. Several of them would silently break assumptions of producers and workers: replies are
bytes, reads may block for longer than a short time-out, each command has one reply.
"""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

SENTINEL = "sentinel_"
"""Prefix of the options for connections to the Sentinels."""

OWN_RETRIES = "clients (`patience_s`) and workers repeat commands that are safe to repeat"
OWN_TIMES = "reads block on the server; set `patience_s` of a client, `redis.timeout_s` of a worker"
BYTES = "replies are bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlOption:
    """An option of the URL."""

    name: str
    meaning: str
    """The effect of the option; for a refused one, the reason."""

    parse: Callable[[str], object] | None = None
    """Parser of the value, which raises ValueError; None: the option is not served."""

    ignored: tuple[str, ...] = ()
    """Values, in lower case, that are accepted and ignored, because they state the default."""

    has_tls: bool = False
    """Whether the option is served only with TLS."""

    @property
    def treatment(self) -> str:
        """How the option is treated, for the documents."""
        if self.parse is not None:
            return "served with TLS" if self.has_tls else "served"
        return f"refused, except {' and '.join(f'`{value}`' for value in self.ignored)}" if self.ignored else "refused"


def _number(value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"expected a number, got {value!r}")
    return int(value)


def _switch(value: str) -> bool:
    if value.lower() not in ("true", "false", "yes", "no", "on", "off", "1", "0"):
        raise ValueError(f"expected true or false, got {value!r}")
    return value.lower() in ("true", "yes", "on", "1")


def _text(value: str) -> str:
    if not value:
        raise ValueError("it has no value")
    return value


def _name(value: str) -> str:
    if not value or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError("expected printable characters without spaces")
    return value


def _certificates(value: str) -> str:
    if value not in ("none", "optional", "required"):
        raise ValueError(f"expected none, optional or required, got {value!r}")
    return value


def _version(value: str) -> ssl.TLSVersion:
    versions = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
    by_number = {str(int(version)): version for version in versions.values()}
    if value not in versions | by_number:
        raise ValueError(f"expected 1.2 or 1.3, got {value!r}")
    return (versions | by_number)[value]


OPTIONS: Final = (
    UrlOption(name="db", meaning="number of the database, as in the path", parse=_number),
    UrlOption(name="username", meaning="user, as before the host", parse=_text),
    UrlOption(name="password", meaning="password, as before the host", parse=_text),
    UrlOption(name="client_name", meaning="name in the server's `CLIENT LIST`", parse=_name),
    UrlOption(
        name="socket_keepalive", meaning="whether TCP probes an idle connection; not for `unix://`", parse=_switch
    ),
    UrlOption(name="ssl_ca_certs", meaning="file of trusted certificates", parse=_text, has_tls=True),
    UrlOption(name="ssl_ca_path", meaning="folder of trusted certificates", parse=_text, has_tls=True),
    UrlOption(name="ssl_ca_data", meaning="trusted certificates themselves", parse=_text, has_tls=True),
    UrlOption(name="ssl_certfile", meaning="file of the client's certificate", parse=_text, has_tls=True),
    UrlOption(name="ssl_keyfile", meaning="file of its key", parse=_text, has_tls=True),
    UrlOption(name="ssl_password", meaning="password of that file", parse=_text, has_tls=True),
    UrlOption(
        name="ssl_cert_reqs",
        meaning="whether the server's certificate is checked: `required`, `optional` or `none`",
        parse=_certificates,
        has_tls=True,
    ),
    UrlOption(
        name="ssl_check_hostname", meaning="whether that certificate must name the host", parse=_switch, has_tls=True
    ),
    UrlOption(name="ssl_min_version", meaning="minimum version of TLS: `1.2` or `1.3`", parse=_version, has_tls=True),
    UrlOption(name="ssl_ciphers", meaning="ciphers, as OpenSSL writes them", parse=_text, has_tls=True),
    UrlOption(name="protocol", meaning="replies are read as RESP 2", ignored=("2",)),
    UrlOption(name="decode_responses", meaning=BYTES, ignored=("false", "0")),
    UrlOption(name="encoding", meaning="text is UTF-8", ignored=("utf-8", "utf8")),
    UrlOption(name="encoding_errors", meaning=BYTES, ignored=("strict",)),
    UrlOption(name="retry_on_timeout", meaning=OWN_RETRIES, ignored=("false", "0")),
    UrlOption(name="retry_on_error", meaning=OWN_RETRIES),
    UrlOption(name="health_check_interval", meaning="connections are checked before each use", ignored=("0",)),
    UrlOption(name="socket_timeout", meaning=OWN_TIMES),
    UrlOption(name="socket_connect_timeout", meaning=OWN_TIMES),
    UrlOption(name="timeout", meaning=OWN_TIMES),
    UrlOption(
        name="max_connections",
        meaning="a client opens one for each thread that waits, an asyncio client up to 16 and one for each pipe",
    ),
    UrlOption(name="socket_read_size", meaning="it has no effect here"),
    UrlOption(name="ssl_validate_ocsp", meaning="revoked certificates are not looked up"),
    UrlOption(name="ssl_validate_ocsp_stapled", meaning="as `ssl_validate_ocsp`"),
)
"""All known options. Any other is refused."""

BY_NAME: Final = {option.name: option for option in OPTIONS}

NOT_BY_SENTINELS = ("db", "client_name", "socket_keepalive")


def read_options(url: str) -> dict[str, object]:
    """Parse and check the options of a URL of any form; prefixes are kept.

    Raises:
        ValueError: one is unknown, refused, stated twice, or has a wrong value; the message is one sentence.
    """
    parts = urlsplit(url)
    if parts.fragment or url.endswith("#"):
        raise ValueError("it has a #, which ends a URL's options; write %23")
    options: dict[str, object] = {}
    names = set[str]()
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in names:
            raise ValueError(f"the option {name} is given twice")
        names.add(name)
        option = _option(name, parts.scheme)
        if option.parse is not None:
            options[name] = _parsed(name, option.parse, value)
        elif value.lower() not in option.ignored:
            raise ValueError(f"the option {name} is not supported: {option.meaning}. Remove it")
    return options


def _option(name: str, scheme: str) -> UrlOption:
    is_for_sentinels = name.startswith(SENTINEL) and "+sentinel" in scheme
    option = BY_NAME.get(name.removeprefix(SENTINEL) if is_for_sentinels else name)
    if option is None or (is_for_sentinels and option.name in NOT_BY_SENTINELS):
        raise ValueError(f"there is no option {name}. Remove it")
    if option.has_tls and not scheme.startswith("rediss"):
        raise ValueError(f"the option {name} is for TLS: write rediss instead of {scheme.split('+')[0]}, or remove it")
    if name == "socket_keepalive" and scheme == "unix":
        raise ValueError(f"the option {name} is for TCP. Remove it")
    return option


def _parsed(name: str, parse: Callable[[str], object], value: str) -> object:
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"the option {name} has a wrong value: {error}") from None


def read_database(path: str, options: Mapping[str, object]) -> int:
    """Return the number of the database from the URL's path or option; 0 by default.

    Raises:
        ValueError: the path is not a number, or the option has another number.
    """
    if path and not (path.isascii() and path.isdigit()):
        raise ValueError(f"a database is named by its number, got {path!r}")
    number, stated = int(path or 0), options.get("db", int(path or 0))
    if not isinstance(stated, int) or (path and stated != number):
        raise ValueError(f"its path names database {number}, its option db {stated}")
    return stated


def without_options(url: str) -> str:
    """Return the URL without its options."""
    return url.partition("?")[0]
