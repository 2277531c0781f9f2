"""Settings of the gateway."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from sluice.producer.errors import InvalidSetting
from sluice.protocol.bounds import (
    ADDRESS_CONNECTIONS,
    BODY_BYTES,
    BOUNDS,
    CONNECTIONS,
    FILE_MIB,
    HELD_MIB,
    KEY_READS,
    TENANT_BATCHES,
    TENANT_FILES_MIB,
    TENANT_HELD_MIB,
    TENANT_REQUESTS,
    TENANT_UNREAD_MIB,
)

ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:[0-9]+)?")
MAX_DAYS = 3650
AT_LEAST_1 = [bound for bound in BOUNDS if (bound.set_by or "").startswith("producer serve ")]

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class ServedQueue:
    """One queue that the gateway serves."""

    name: str
    partitions: int | None = None
    """Must be the number of its workers; None takes theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Where the gateway listens, and which queues it serves.

    Raises:
        InvalidSetting: a value is out of its range.
    """

    redis_url: str | None = None
    database_url: str
    """Database with the API keys."""

    is_key_required: bool = False
    """Whether requests need an API key even while the database has none."""

    files_url: str = "file:///nowhere"
    """Where files are kept."""

    max_file_mib: int = FILE_MIB.most
    """Largest file that a client may upload."""

    tenant_batches: int = TENANT_BATCHES.most
    """Batches of a tenant that are not over."""

    tenant_files_mib: int = TENANT_FILES_MIB.most
    """What the files of a tenant may take."""

    queues: tuple[ServedQueue, ...] = (ServedQueue("default"),)
    model_queues: tuple[tuple[str, str], ...] = ()
    """Models and the queue of each, for those that have no worker yet."""

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

    response_days: float = 30.0
    """How long responses are kept, and deadline of those in the background."""

    max_body_bytes: int = BODY_BYTES.most
    max_held_bytes: int = HELD_MIB.most * 1024 * 1024
    """Most bytes of bodies that all requests may hold in memory."""

    max_connections: int = CONNECTIONS.most
    """More are told so with 503, or closed."""

    tenant_held_mib: int = TENANT_HELD_MIB.most
    tenant_unread_mib: int = TENANT_UNREAD_MIB.most
    tenant_requests: int = TENANT_REQUESTS.most
    address_connections: int = ADDRESS_CONNECTIONS.most
    key_reads: int = KEY_READS.most
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks whose `X-Forwarded-For` is believed."""

    arrival_limit_s: float = 30.0
    """Longest time for a request to arrive, and a second for each 16 KiB of it; longest pause on the way."""

    read_limit_s: float = 60.0
    """How long a client may read nothing of what waits for it. Then its connection is aborted."""

    drain_s: float = 30.0
    """Longest time that open answers may take to end after SIGTERM. Then they end with an error."""

    log_format: str = "auto"
    log_level: str = "info"

    def __post_init__(self) -> None:
        for message in self._faults():
            raise InvalidSetting(message)

    def _faults(self) -> Iterator[str]:
        if not 0 <= self.port <= 65_535:
            yield f"--port must be in [0, 65535], got {self.port}"
        if (self.tls_cert is None) != (self.tls_key is None):
            yield "give both of --tls-cert and --tls-key, or neither"
        yield from self._limit_faults()
        yield from self._queue_faults()
        yield from self._proxy_faults()
        for origin in self.cors_origins:
            if not ORIGIN.fullmatch(origin):
                yield f"--cors-origin must be an origin such as https://chat.example.com, got {origin!r}"

    def _limit_faults(self) -> Iterator[str]:
        limits_s = (("request", self.request_limit_s), ("read", self.read_limit_s), ("arrival", self.arrival_limit_s))
        for name, limit_s in limits_s:
            if limit_s <= 0:
                yield f"--{name}-limit must be over 0 s, got {limit_s:g}"
        for name, limit_s in (("return", self.return_limit_s), ("drain", self.drain_s)):
            if limit_s < 0:
                yield f"--{name}-limit must be 0 s or more, got {limit_s:g}"
        for bound in AT_LEAST_1:
            if getattr(self, bound.name) < 1:
                yield f"{bound.flag} must be 1 or more, got {getattr(self, bound.name)}"
        if not 0 < self.response_days < MAX_DAYS:
            yield f"--response-days must be over 0 and below {MAX_DAYS}, got {self.response_days:g}"

    def _proxy_faults(self) -> Iterator[str]:
        for proxy in self.trusted_proxies:
            try:
                ip_network(proxy, strict=False)
            except ValueError:
                yield f"--trusted-proxy must be an address or a network, such as 10.0.0.0/8, got {proxy!r}"

    def _queue_faults(self) -> Iterator[str]:
        names = [queue.name for queue in self.queues]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"--queue {name} is given more than once"
        for model, queue in self.model_queues:
            if queue not in names:
                yield f"--model {model}={queue} names a queue that is not served; served: {', '.join(names)}"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's own."""
    try:
        return host in LOOPBACK_NAMES or ip_address(host).is_loopback
    except ValueError:
        return False
