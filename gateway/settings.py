"""Settings of the gateway."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Literal, TypeVar

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
    TENANT_SCHEDULED_JOBS,
    TENANT_SCHEDULES,
    TENANT_UNREAD_MIB,
    Bound,
)
from sluice.protocol.checks import MAX_PORT
from sluice.protocol.settings import GATEWAY, PREFIX, TIME, Declared, setting, settings_of

ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:[0-9]+)?")
MAX_DAYS = 3650
AT_LEAST_1 = [bound for bound in BOUNDS if (bound.set_by or "").startswith("producer serve ")]

T = TypeVar("T")

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class ServedQueue:
    """One queue that the gateway serves."""

    name: str
    partitions: int | None = None
    """Must be the workers' number of partitions; None: use theirs."""


def _own(default: T, name: str, metavar: str, help_text: str) -> T:
    return setting(default, env=GATEWAY + name, metavar=metavar, help=help_text)


def _most(bound: Bound, help_text: str) -> int:
    name = bound.flag.removeprefix("--").replace("-", "_").upper()
    return _own(bound.most, name, "MIB" if bound.name.endswith("_mib") else "COUNT", help_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The address on which the gateway listens, the queues that it serves, and its limits.

    Raises:
        InvalidSetting: a value is out of its range.
    """

    host: str = _own("127.0.0.1", "HOST", "ADDRESS", "Address to listen on.")
    port: int = _own(8000, "PORT", "PORT", "Port to listen on.")
    is_key_required: bool = _own(
        False,
        "REQUIRE_KEYS",
        "",
        "Do not start without an active API key, and serve no request without one. If not given: on loopback"
        " addresses, requests need a key as soon as one exists.",
    )
    tls_cert: str | None = _own(None, "TLS_CERT", "FILE", "Certificate chain, in PEM. Serves plain HTTP if not given.")
    tls_key: str | None = _own(None, "TLS_KEY", "FILE", "Key of the certificate, in PEM, without a password.")
    cors_origins: tuple[str, ...] = _own(
        (), "CORS_ORIGIN", "ORIGIN", "Let pages of this origin read answers. May be repeated."
    )
    request_limit_s: float = _own(600.0, "REQUEST_LIMIT_S", TIME, "Cancel the job of a request that takes longer.")
    response_days: float = _own(
        30.0,
        "RESPONSE_DAYS",
        "DAYS",
        "Keep responses of /v1/responses for this long. It is also the deadline of those in the background.",
    )
    return_limit_s: float = _own(
        30.0,
        "RETURN_LIMIT_S",
        TIME,
        "Cancel the job of a request with an Idempotency-Key this long after its last client has left.",
    )
    read_limit_s: float = _own(
        60.0,
        "READ_LIMIT_S",
        TIME,
        "Abort the connection of a client that leaves its answer unread for this long.",
    )
    arrival_limit_s: float = _own(
        30.0,
        "ARRIVAL_LIMIT_S",
        TIME,
        "Close the connection of a request that takes longer to arrive, or pauses for longer. Each 16 KiB adds a"
        " second.",
    )
    max_connections: int = _most(
        CONNECTIONS, "Accept at most this many connections. Further ones get a 503 or are closed."
    )
    address_connections: int = _most(
        ADDRESS_CONNECTIONS, "Accept at most this many connections from one address. Further ones are closed unread."
    )
    tenant_requests: int = _most(
        TENANT_REQUESTS, "Answer 429 to further requests of a tenant while this many are open."
    )
    tenant_held_mib: int = _most(
        TENANT_HELD_MIB, "Answer 429 while bodies of a tenant's requests take this much memory."
    )
    tenant_unread_mib: int = _most(
        TENANT_UNREAD_MIB, "Answer 429 while more than this of a tenant's answers waits to be read."
    )
    key_reads: int = _most(KEY_READS, "Answer 429 to a key after this many reads and refused requests in a minute.")
    trusted_proxies: tuple[str, ...] = _own(
        (),
        "TRUSTED_PROXY",
        "ADDRESS",
        "Trust the X-Forwarded-For header of this proxy, an address or a network. May be repeated.",
    )
    drain_s: float = _own(
        30.0,
        "DRAIN_LIMIT_S",
        TIME,
        "Wait this long after SIGTERM for open answers to end; the others then end with an error.",
    )
    files_url: str | None = setting(
        None,
        env="FILES_URL",
        metavar="URL",
        help="Where to keep files: file:///FOLDER, or s3://BUCKET for several hosts. Uses the state folder if not"
        " given.",
    )
    max_file_mib: int = _most(FILE_MIB, "Refuse uploads of larger files.")
    tenant_files_mib: int = _most(
        TENANT_FILES_MIB,
        "Refuse uploads, batches and stored responses of a tenant whose files and stored responses take this much.",
    )
    tenant_batches: int = _most(
        TENANT_BATCHES, "Answer 429 to a new batch of a tenant that has this many unfinished batches."
    )
    tenant_schedules: int = _most(
        TENANT_SCHEDULES, "Answer 409 to a new schedule of a tenant that has this many in the queue."
    )
    tenant_scheduled_jobs: int = _most(
        TENANT_SCHEDULED_JOBS,
        "Answer 409 to a schedule if one run of each schedule of the tenant in the queue would have more jobs.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", env="LOG_LEVEL", metavar="LEVEL", help="Each request is logged at info."
    )
    log_format: Literal["auto", "plain", "json"] = setting(
        "auto",
        env="LOG_FORMAT",
        metavar="FORMAT",
        help="Format of the log; auto: plain on a terminal, JSON elsewhere.",
    )

    # Shared with the other commands of `producer`, which declare these options.
    redis_url: str | None = None
    database_url: str
    """Database with the API keys."""

    queues: tuple[ServedQueue, ...] = (ServedQueue("default"),)
    model_queues: tuple[tuple[str, str], ...] = ()
    """Pairs of model and queue, for models that have no worker yet."""

    max_body_bytes: int = BODY_BYTES.most
    max_held_bytes: int = HELD_MIB.most * 1024 * 1024
    """Most memory that the bodies of all requests may use."""

    def __post_init__(self) -> None:
        for message in self._faults():
            raise InvalidSetting(message)

    def _faults(self) -> Iterator[str]:
        if not 0 <= self.port <= MAX_PORT:
            yield f"--port must be in [0, {MAX_PORT}], got {self.port}"
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


SETTINGS = tuple(settings_of("gateway", GatewaySettings))

DECLARED = Declared(
    settings=SETTINGS,
    is_ours=lambda name: name.startswith(PREFIX + GATEWAY),
    hint="`producer serve --help` lists all",
    other_sections=None,
)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback one."""
    try:
        return host in LOOPBACK_NAMES or ip_address(host).is_loopback
    except ValueError:
        return False
