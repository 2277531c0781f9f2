"""Bounds on the resources of a tenant, an API key or an address, each declared here once.

Defaults, flags and errors come from this table, `docs/reference/bounds.md` is generated from it
(`python -m tools.bounds_page`), and `tests/rules/test_bounds.py` compares it with the commands. To add a bound, add a
`Bound` and its place in `BOUNDS`.
"""

from dataclasses import dataclass
from typing import Literal

from sluice.protocol.limits import DEFAULT_TENANT_SHARE_PERCENT

Holder = Literal["API key", "tenant", "address", "request", "gateway", "queue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One bound, and the answer to a request beyond it."""

    name: str
    """The name; also the label `bound` of the metric, and the name of the setting if a flag sets it."""

    what: str
    """The bounded quantity, with its unit."""

    per: Holder
    default: int | None
    """The default; None: no bound."""

    set_by: str | None
    """The command and its flag, such as `producer serve --max-connections`; None: the bound is fixed."""

    status: int | None
    """HTTP status of the answer; None: no answer."""

    code: str | None
    """Code of the error; None: no code."""

    metric: str | None = "sluice_gateway_refused_total"
    """Metric that counts refusals, or shows how much is used."""

    note: str = ""

    @property
    def most(self) -> int:
        """The default, for a bound that has one.

        Raises:
            ValueError: the bound has no default.
        """
        if self.default is None:
            raise ValueError(f"the bound {self.name} has no default")
        return self.default

    @property
    def flag(self) -> str:
        """The flag that sets the bound.

        Raises:
            ValueError: the bound is fixed.
        """
        if self.set_by is None:
            raise ValueError(f"the bound {self.name} is fixed: no flag sets it")
        return self.set_by.rpartition(" ")[2]


REQUESTS_PER_MINUTE = Bound(
    name="rpm",
    what="requests for output a minute",
    per="API key",
    default=None,
    set_by="producer keys create --rpm",
    status=429,
    code="rate_limit_exceeded",
    note="Redis counts over all gateways with the same first queue",
)
TOKENS_PER_MINUTE = Bound(
    name="tpm",
    what="tokens of prompts and `max_tokens` a minute",
    per="API key",
    default=None,
    set_by="producer keys create --tpm",
    status=429,
    code="rate_limit_exceeded",
    note="a request that is larger than the bound is 400 `request_too_large`",
)
CONNECTIONS = Bound(
    name="max_connections",
    what="connections",
    per="gateway",
    default=10_000,
    set_by="producer serve --max-connections",
    status=503,
    code=None,
    metric=None,
    note="256 more get a 503; further ones are closed unread",
)
HEADERS = Bound(
    name="headers",
    what="lines of headers",
    per="request",
    default=100,
    set_by=None,
    status=431,
    code="too_many_headers",
)
PARAMETERS = Bound(
    name="parameters",
    what="parameters of a query",
    per="request",
    default=100,
    set_by=None,
    status=400,
    code="too_many_parameters",
)
HEADER_BYTES = Bound(
    name="header_bytes",
    what="bytes of headers",
    per="request",
    default=32 * 1024,
    set_by=None,
    status=431,
    code="headers_too_large",
)
BODY_BYTES = Bound(
    name="body_bytes",
    what="bytes of a body of JSON",
    per="request",
    default=8 * 1024 * 1024,
    set_by=None,
    status=413,
    code="body_too_large",
)
BODY_TEXTS = Bound(
    name="body_texts",
    what="names and texts of a body of JSON",
    per="request",
    default=100_000,
    set_by=None,
    status=413,
    code="body_too_large",
)
BODY_VALUES = Bound(
    name="body_values",
    what="commas of a body of JSON, also in texts",
    per="request",
    default=500_000,
    set_by=None,
    status=413,
    code="body_too_large",
    note="and 200,000 opening brackets and braces",
)
FILE_MIB = Bound(
    name="max_file_mib",
    what="MiB of an uploaded file",
    per="request",
    default=512,
    set_by="producer serve --max-file-mib",
    status=413,
    code="file_too_large",
)
HELD_MIB = Bound(
    name="max_held_mib",
    what="MiB of request bodies in memory",
    per="gateway",
    default=256,
    set_by=None,
    status=503,
    code="overloaded",
)
TENANT_HELD_MIB = Bound(
    name="tenant_held_mib",
    what="MiB of request bodies in memory",
    per="tenant",
    default=64,
    set_by="producer serve --tenant-held-mib",
    status=429,
    code="too_many_bytes_in_flight",
    note="received bytes, until the answer begins; the first 16 KiB of a body do not count",
)
TENANT_UNREAD_MIB = Bound(
    name="tenant_unread_mib",
    what="MiB of answers that wait to be read",
    per="tenant",
    default=64,
    set_by="producer serve --tenant-unread-mib",
    status=429,
    code="too_many_unread_bytes",
    note="if the answer has begun, its connection is reset",
)
TENANT_REQUESTS = Bound(
    name="tenant_requests",
    what="open requests, streams included",
    per="tenant",
    default=5000,
    set_by="producer serve --tenant-requests",
    status=429,
    code="too_many_open_requests",
)
TENANT_SHARE = Bound(
    name="tenant_share_percent",
    what="percent of what other tenants leave of a queue's waiting jobs, tokens and bytes",
    per="tenant",
    default=DEFAULT_TENANT_SHARE_PERCENT,
    set_by="producer queues set --tenant-share-percent",
    status=429,
    code="tenant_full",
    note="of a tenant alone in a queue for a day, 100; one job in any case. Batches wait instead",
)
ADDRESS_CONNECTIONS = Bound(
    name="address_connections",
    what="connections",
    per="address",
    default=5000,
    set_by="producer serve --address-connections",
    status=None,
    code=None,
    note="further ones are closed unread. Not of proxies that `--trusted-proxy` names; of IPv6, for each /64",
)
KEY_READS = Bound(
    name="key_reads",
    what="reads and refused requests a minute",
    per="API key",
    default=12_000,
    set_by="producer serve --key-reads",
    status=429,
    code="too_many_reads",
    note="each gateway counts; every 4 KiB of an answer of JSON or HTML, or of a refused body, count as one more. "
    "A sixth of them may come at once",
)

TENANT_BATCHES = Bound(
    name="tenant_batches",
    what="unfinished batches",
    per="tenant",
    default=100,
    set_by="producer serve --tenant-batches",
    status=429,
    code="too_many_batches",
    note="counted in the database, so over all gateways",
)

TENANT_FILES_MIB = Bound(
    name="tenant_files_mib",
    what="MiB of stored files, outputs of batches included, and of stored responses",
    per="tenant",
    default=10 * 1024,
    set_by="producer serve --tenant-files-mib",
    status=413,
    code="too_many_stored_bytes",
    note="counted in the database, so over all gateways, until they are deleted; a file counts 4 KiB at least, and a "
    "response 1 KiB besides its input and output. Each gateway adds the uploads that it receives, with the length that "
    "they state",
)

SCHEDULES = Bound(
    name="schedules",
    what="schedules",
    per="queue",
    default=1000,
    set_by=None,
    status=409,
    code="too_many_schedules",
    metric=None,
    note="about: two clients that add the last one at once may exceed it",
)
TENANT_SCHEDULES = Bound(
    name="tenant_schedules",
    what="schedules in a queue",
    per="tenant",
    default=100,
    set_by="producer serve --tenant-schedules",
    status=409,
    code="too_many_schedules",
    note="about: several gateways that add the last one at once may exceed it; likewise the next",
)
TENANT_SCHEDULED_JOBS = Bound(
    name="tenant_scheduled_jobs",
    what="jobs in one run of each schedule in a queue",
    per="tenant",
    default=2500,
    set_by="producer serve --tenant-scheduled-jobs",
    status=409,
    code="too_many_scheduled_jobs",
    note="and no more than the `rpm` and, in tokens, the `tpm` of the key that adds one: else 400 `request_too_large`",
)
BLOCKED_JOBS = Bound(
    name="blocked_jobs",
    what="jobs that wait for others",
    per="queue",
    default=100_000,
    set_by=None,
    status=429,
    code="full_blocked",
    metric=None,
    note="about: two clients that add the last ones at once may exceed it; likewise the next",
)
BLOCKED_MIB = Bound(
    name="blocked_mib",
    what="MiB of jobs that wait for others",
    per="queue",
    default=256,
    set_by=None,
    status=429,
    code="full_blocked",
    metric=None,
)

BOUNDS = (
    REQUESTS_PER_MINUTE,
    TOKENS_PER_MINUTE,
    CONNECTIONS,
    HEADERS,
    HEADER_BYTES,
    PARAMETERS,
    BODY_BYTES,
    BODY_TEXTS,
    BODY_VALUES,
    FILE_MIB,
    HELD_MIB,
    TENANT_HELD_MIB,
    TENANT_UNREAD_MIB,
    TENANT_REQUESTS,
    TENANT_SHARE,
    ADDRESS_CONNECTIONS,
    TENANT_BATCHES,
    TENANT_FILES_MIB,
    KEY_READS,
    SCHEDULES,
    TENANT_SCHEDULES,
    TENANT_SCHEDULED_JOBS,
    BLOCKED_JOBS,
    BLOCKED_MIB,
)
"""All bounds, in the order of the page."""
