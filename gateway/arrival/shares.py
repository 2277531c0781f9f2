"""Memory that requests use, in all and by tenant: bodies, unread responses, and the number of open requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request

from sluice.gateway.api_keys.key import ApiKey
from sluice.gateway.arrival.reads import Reads
from sluice.gateway.refusals import refusal
from sluice.protocol.bounds import HELD_MIB, TENANT_HELD_MIB, TENANT_REQUESTS, TENANT_UNREAD_MIB

HELD = "held"
"""Field of a request's state that has its `RequestShare`."""

FREE_BYTES = 16 * 1024
"""The first bytes of a body that are not counted, so that small requests are served however much others use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareLimits:
    """The limits of all requests, of a tenant, and of a key."""

    held_bytes: int
    """Bodies of all requests."""

    tenant_held_bytes: int
    tenant_unread_bytes: int
    tenant_requests: int
    key_reads: int


@dataclass(slots=True, eq=False)
class Share:
    """The memory that the requests of a tenant use. Changes with them."""

    num_requests: int = 0
    num_held_bytes: int = 0
    num_unread_bytes: int = 0


class Shares:
    """The memory that all requests use. Changes as requests arrive, are answered and read."""

    def __init__(self, limits: ShareLimits) -> None:
        self.limits = limits
        self.reads = Reads(limits.key_reads)
        self.num_held_bytes = 0
        self._by_tenant: dict[str, Share] = {}

    def join(self, tenant: str) -> Share:
        """Count a request of a tenant; return its share.

        Raises:
            HttpError: 429, the tenant uses too much memory or has too many open requests.
        """
        share = self._by_tenant.get(tenant) or Share()
        if share.num_requests >= self.limits.tenant_requests:
            raise refusal(
                TENANT_REQUESTS, f"{share.num_requests} requests of the tenant are open; wait for some to end"
            )
        if share.num_unread_bytes > self.limits.tenant_unread_bytes:
            raise refusal(
                TENANT_UNREAD_MIB, f"the tenant has {share.num_unread_bytes} unread bytes of answers; read them first"
            )
        share.num_requests += 1
        self._by_tenant[tenant] = share
        return share

    def drop_unused(self, tenant: str) -> None:
        """Forget the share of a tenant without open requests and unread responses."""
        share = self._by_tenant.get(tenant)
        if share is not None and share.num_requests == share.num_unread_bytes == 0:
            del self._by_tenant[tenant]


class RequestShare:
    """The memory that one request uses. Changes as its body arrives, and as its response is read."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._num_bytes = self._num_counted = self._num_reserved = self._num_unread = 0
        self._tenant, self._share = "", Share()
        self._key_id: str | None = None
        self._num_received = 0

    def belong_to(self, key: ApiKey) -> None:
        """Count the request towards the bounds of a key and its tenant from now on.

        Raises:
            HttpError: 429, the tenant uses too much memory, or the key has read too much.
        """
        self._shares.reads.check(key.id)
        self._share = self._shares.join(key.tenant)
        self._tenant, self._key_id = key.tenant, key.id

    def charge(self, num_bytes: int) -> None:
        """Count the request as a read of this many bytes and of its body."""
        if self._key_id is not None:
            self._shares.reads.add(self._key_id, num_bytes + self._num_received)

    def take(self, num_bytes: int) -> None:
        """Count a piece of its body.

        Raises:
            HttpError: 503, all requests together use too much memory; or 429, those of its tenant do.
        """
        self._num_received += num_bytes
        self._num_bytes += num_bytes
        added = max(0, self._num_bytes - FREE_BYTES) - self._num_counted
        if added:
            self._check(added)
            self._count(added)
            self._num_counted += added

    def reserve(self, num_bytes: int) -> None:
        """Count memory that the request needs besides its body, until it ends.

        Raises:
            HttpError: as `take`.
        """
        self._check(num_bytes)
        self._count(num_bytes)
        self._num_reserved += num_bytes

    def give_back(self) -> None:
        """Release the memory of the body."""
        self._count(-self._num_counted)
        self._num_bytes = self._num_counted = 0

    def end(self) -> None:
        """Count the request as ended. The unread part of its response counts until the client has read it."""
        self.give_back()
        self._count(-self._num_reserved)
        self._share.num_requests -= 1
        self._shares.drop_unused(self._tenant)

    def wait_for_reader(self, num_bytes: int) -> bool:
        """Set the number of unread bytes of the response; return whether the tenant has too many."""
        num_others = self._share.num_unread_bytes - self._num_unread
        self._share.num_unread_bytes = num_others + num_bytes
        self._num_unread = num_bytes
        self._shares.drop_unused(self._tenant)
        return bool(self._tenant) and num_bytes > 0 and num_others > self._shares.limits.tenant_unread_bytes

    def _check(self, num_bytes: int) -> None:
        limits = self._shares.limits
        if self._tenant and self._share.num_held_bytes + num_bytes > limits.tenant_held_bytes:
            raise refusal(TENANT_HELD_MIB, "too many large requests of the tenant at a time")
        if self._shares.num_held_bytes + num_bytes > limits.held_bytes:
            raise refusal(HELD_MIB, "too many large requests at a time")

    def _count(self, num_bytes: int) -> None:
        self._share.num_held_bytes += num_bytes
        self._shares.num_held_bytes += num_bytes


def share_of(request: Request) -> RequestShare:
    """Return the share of a request."""
    return request.state[HELD]


def share_in(scope: Mapping[str, Any]) -> RequestShare | None:  # Any: as ASGI has it
    """Return the share of the request of a scope; None if it did not reach the application."""
    return cast("RequestShare | None", scope.get("state", {}).get(HELD))
