"""Limit how many senders the webhooks of one tenant use at once, so that its slow receivers do not delay others.

Each delivery in progress has a member in the tenant's sorted set in rq's Redis, with the time at which it must have
ended: a sender that was killed leaves its slot then.
"""

import contextlib

from redis.exceptions import RedisError

from sluice.worker.callbacks.events import owner_of
from sluice.worker.connection.clients import Client

_TAKE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local is_mine = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not is_mine and redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""


class SenderSlots:
    """The slots of the tenant of one event."""

    def __init__(self, client: Client, body: str, *, limit: int, held_s: float) -> None:
        """`held_s` is the longest time of a delivery."""
        self._client = client
        queue, tenant = owner_of(body)
        # Batches, which have no tenant, share one's slots.
        self._key = f"sluice:sending:{queue}:{tenant or 'none'}"
        self._limit = limit
        self._held_ms = round(held_s * 1000)

    def take(self, event_id: str) -> bool:
        """Take a slot for an event; return False if all of the tenant's are in use."""
        return bool(self._client.eval(_TAKE, 1, self._key, event_id, self._limit, self._held_ms))

    def leave(self, event_id: str) -> None:
        """Give the slot back. If Redis does not answer, it is free when its time is over."""
        with contextlib.suppress(RedisError):
            self._client.zrem(self._key, event_id)
