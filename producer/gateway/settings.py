"""Settings of the gateway."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address

from sluice.producer.errors import InvalidSetting

ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:[0-9]+)?")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Where the gateway listens, and which queue it serves.

    Raises:
        InvalidSetting: a value is out of its range.
    """

    redis_url: str | None = None
    database_url: str
    """Database with the API keys."""

    is_key_required: bool = False
    """Whether requests need an API key even while the database has none."""

    queue: str = "default"
    partitions: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: str | None = None
    """File of the certificate chain, and in `tls_key` of its key; None serves plain HTTP."""

    tls_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may read answers."""

    request_limit_s: float = 600.0
    """Deadline of a job whose client waits for it."""

    return_limit_s: float = 30.0
    """How long a job with an idempotency key outlives its last reader, who may come back."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_connections: int = 10_000
    drain_s: float = 30.0
    """Longest time that open streams may take to end after SIGTERM."""

    def __post_init__(self) -> None:
        for message in self._faults():
            raise InvalidSetting(message)

    def _faults(self) -> Iterator[str]:
        if not 0 <= self.port <= 65_535:
            yield f"--port must be in [0, 65535], got {self.port}"
        if self.request_limit_s <= 0:
            yield f"--request-limit must be over 0 s, got {self.request_limit_s:g}"
        if self.return_limit_s < 0:
            yield f"--return-limit must be 0 s or more, got {self.return_limit_s:g}"
        if (self.tls_cert is None) != (self.tls_key is None):
            yield "give both of --tls-cert and --tls-key, or neither"
        for origin in self.cors_origins:
            if not ORIGIN.fullmatch(origin):
                yield f"--cors-origin must be as https://chat.example.com, got {origin!r}"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's own."""
    try:
        return host in LOOPBACK_NAMES or ip_address(host).is_loopback
    except ValueError:
        return False
