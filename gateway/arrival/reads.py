"""Rate limit of API keys for reads and refused requests, which cost time but count towards no limit of the queue."""

from math import ceil
from time import monotonic

from sluice.gateway.refusals import refusal
from sluice.protocol.bounds import KEY_READS

BYTES_PER_READ = 4096
AT_ONCE_S = 10.0
"""Burst: the reads that are allowed in this many seconds may come at once."""

MINUTE_S = 60.0


class Reads:
    """The reads of each key. Changes as requests end: the cost of a read is known then.

    Args:
        most: Reads a minute of one key.
    """

    def __init__(self, most: int) -> None:
        self._most, self._per_s = most, most / MINUTE_S
        self._free_s: dict[str, float] = {}
        """When the reads of each key are paid off, on the monotonic clock."""

    def check(self, key_id: str) -> None:
        """Check that a key may send a request.

        Raises:
            HttpError: 429, the key has read too much.
        """
        wait_s = self._free_s.get(key_id, 0.0) - monotonic() - AT_ONCE_S
        if wait_s > 0:
            message = f"the API key's bound of {self._most} reads a minute is reached; try again in {ceil(wait_s)} s"
            raise refusal(KEY_READS, message, retry_after_s=ceil(wait_s))

    def add(self, key_id: str, num_bytes: int) -> None:
        """Count a read of this many bytes."""
        cost_s = (1 + num_bytes // BYTES_PER_READ) / self._per_s
        self._free_s[key_id] = max(self._free_s.get(key_id, 0.0), monotonic()) + cost_s
