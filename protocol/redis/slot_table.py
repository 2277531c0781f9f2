"""A Redis Cluster's map from slots to shards. Without I/O.

All keys of a partition have one hash tag, so they lie in one slot, and a command goes to the shard of its first key.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, cast

from redis.crc import key_slot

from sluice.protocol.redis.execution import Command, Reply
from sluice.protocol.redis.urls import Address

CLUSTER_SLOTS: Command = ("CLUSTER", "SLOTS")
"""Ask a node for the slot map; `SlotTable.read` reads the reply."""

_TAG = re.compile(rb"\{[^{}]+:\d+\}:")
"""The beginning of every key of a queue."""


class NotACluster(ValueError):
    """A node has replied to CLUSTER SLOTS with an error."""


class SlotTable:
    """The map from slots to the primaries that serve them."""

    def __init__(self, ranges: Iterable[tuple[int, int, Address]]) -> None:
        self._ranges = sorted(ranges)
        self._starts = [start for start, _, _ in self._ranges]

    @classmethod
    def read(cls, reply: Reply, asked: Address) -> "SlotTable":
        """Read a reply to `CLUSTER_SLOTS`; a node that reports no host name for itself has the address asked.

        Raises:
            NotACluster: the reply is an error.
        """
        if isinstance(reply, Exception):
            raise NotACluster(f"it is not a node of a Cluster: {reply}. Give a redis:// URL for a single server")
        rows = cast("list[list[Any]]", reply)  # redis's own reply: [start, end, [host, port, …], replicas …]
        return cls((int(start), int(end), (_text(node[0]) or asked[0], int(node[1]))) for start, end, node, *_ in rows)

    @property
    def addresses(self) -> list[Address]:
        """Each shard's primary."""
        return list(dict.fromkeys(address for _, _, address in self._ranges))

    def shard_of(self, slot: int) -> Address | None:
        """Return the primary that serves a slot; None if no shard does."""
        at = bisect_right(self._starts, slot) - 1
        if at < 0:
            return None
        _, end, address = self._ranges[at]
        return address if slot <= end else None


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def slot_of(command: Command) -> int | None:
    """Return the slot of a command's first key; None for a command without a key of a queue."""
    for argument in command[1:]:
        data = argument.encode() if isinstance(argument, str) else argument
        if isinstance(data, bytes) and _TAG.match(data):
            return key_slot(data)
    return None
