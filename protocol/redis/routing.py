"""Splitting of round trips by the shards of a Redis Cluster. No I/O, which `aio.py` and `blocking.py` do.

All keys of a partition have one hash tag and thus one slot, and a command is sent to the shard of its first key.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError
from redis.exceptions import ConnectionError as RedisConnectionError

from sluice.protocol.redis.execution import Command, Reply
from sluice.protocol.redis.urls import Address

MAX_MOVES = 5
"""Most reads of the slot map for one round trip."""

CLUSTER_SLOTS: Command = ("CLUSTER", "SLOTS")
"""The command for a node's slot map; `SlotTable.read` parses the reply."""

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
    def read(cls, reply: Reply, address: Address) -> "SlotTable":
        """Parse a reply to `CLUSTER_SLOTS` of the node at `address`, which may report no host name for itself.

        Raises:
            NotACluster: the reply is an error.
        """
        if isinstance(reply, Exception):
            raise NotACluster(f"it is not a node of a Cluster: {reply}. Give a redis:// URL for a single server")
        rows = cast("list[list[Any]]", reply)  # rows: [start, end, [host, port, …], replicas …]
        return cls(
            (int(start), int(end), (_text(node[0]) or address[0], int(node[1]))) for start, end, node, *_ in rows
        )

    @property
    def addresses(self) -> list[Address]:
        """The primary of each shard."""
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
    """Return the slot of a command's first key; None if the command has no key of a queue."""
    for argument in command[1:]:
        data = argument.encode() if isinstance(argument, str) else argument
        if isinstance(data, bytes) and _TAG.match(data):
            return key_slot(data)
    return None


# ---------------------------------------------------------------- round trips


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """The commands of a round trip for one shard."""

    address: Address
    commands: tuple[Command, ...]
    places: tuple[int, ...] = (0,)
    """Positions of the commands in the round trip."""


Outcome: TypeAlias = Sequence[Reply] | Exception
"""The replies to a request, or one of `NODE_ERRORS` if there are none."""


@dataclass(frozen=True, slots=True)
class ShardReplies:
    """The replies of all shards to one command without a key, if they differ."""

    replies: tuple[Reply, ...]


@dataclass(slots=True)
class ShardedRoundTrip:
    """One round trip, split by shard, with the replies so far.

    A command without a key is sent to every shard of the round trip, after that shard's other commands, so that a WAIT
    covers all writes. If no command has a key, they are sent to one shard.
    """

    commands: Sequence[Command]
    _replies: dict[int, list[Reply]] = field(default_factory=dict[int, list[Reply]])

    def requests(self, table: SlotTable) -> list[ShardRequest]:
        """Return the requests still to send; the reply to a command whose slot no shard serves is ClusterDownError."""
        by_shard: dict[Address, list[int]] = {}
        for place, command in enumerate(self.commands):
            slot = slot_of(command)
            if slot is None or place in self._replies:
                continue
            address = table.shard_of(slot)
            if address is None:
                self._replies[place] = [slot_without_shard(slot)]
            else:
                by_shard.setdefault(address, []).append(place)
        if not by_shard and not self.is_done and table.addresses:
            by_shard[table.addresses[0]] = []
        keyless = [place for place, command in enumerate(self.commands) if slot_of(command) is None]
        return [self._request(address, sorted([*keyed, *keyless])) for address, keyed in by_shard.items()]

    def _request(self, address: Address, places: list[int]) -> ShardRequest:
        return ShardRequest(address, tuple(self.commands[place] for place in places), tuple(places))

    def receive(self, request: ShardRequest, replies: Sequence[Reply]) -> None:
        """Store a shard's replies; commands refused as MOVED are requested again.

        Raises:
            RedisConnectionError: a slot is being moved between two shards.
        """
        ran = {place: reply for place, reply in zip(request.places, replies, strict=True) if not _has_moved(reply)}
        keyed = [place for place in request.places if slot_of(self.commands[place]) is not None]
        if keyed and not any(place in ran for place in keyed):
            return  # no command ran on this shard, so its replies to commands without a key are ignored
        for place, reply in ran.items():
            self._replies.setdefault(place, []).append(reply)

    @property
    def is_done(self) -> bool:
        """Whether every command has its reply."""
        return len(self._replies) == len(self.commands)

    def replies(self) -> list[Reply]:
        """Return one reply for each command."""
        return [_joined(self._replies[place]) for place in range(len(self.commands))]


def _has_moved(reply: Reply) -> bool:
    has_moved = isinstance(reply, MovedError)
    if isinstance(reply, AskError) and not has_moved:  # MovedError is a subclass of AskError
        raise RedisConnectionError(f"a slot is being moved: {reply}") from reply
    return has_moved


def _joined(replies: list[Reply]) -> Reply:
    """Join the replies of several shards: the first error, else the minimum of counts (WAIT, WAITAOF), else all."""
    errors = [reply for reply in replies if isinstance(reply, Exception)]
    if errors or len(replies) == 1:
        return (errors or replies)[0]
    if all(isinstance(reply, int) for reply in replies):
        return min(cast("list[int]", replies))
    if all(_is_counts(reply) for reply in replies):
        return [min(counts) for counts in zip(*cast("list[list[int]]", replies), strict=True)]
    return replies[0] if all(reply == replies[0] for reply in replies) else ShardReplies(tuple(replies))


def _is_counts(reply: Reply) -> bool:
    return isinstance(reply, list) and all(isinstance(item, int) for item in cast("list[object]", reply))


def replies_of(request: ShardRequest, outcome: Outcome, *, is_partial: bool = False) -> Sequence[Reply]:
    """Return the replies to a request; with `is_partial`, ClusterDownError for each if there are none.

    Raises:
        RedisError, OSError: the outcome of the request, if it has no replies.
    """
    if not isinstance(outcome, Exception):
        return outcome
    if not is_partial:
        raise outcome
    host, port = request.address
    down = ClusterDownError(f"CLUSTERDOWN the shard at {host}:{port} does not answer: {outcome}")
    return [down] * len(request.commands)


def slot_without_shard(slot: int) -> ClusterDownError:
    """Return the error of a command whose slot no shard serves."""
    return ClusterDownError(f"CLUSTERDOWN no shard serves slot {slot}")


def keeps_moving() -> RedisConnectionError:
    """Return the error of a round trip whose slots keep moving."""
    return RedisConnectionError(f"CLUSTERDOWN slots moved {MAX_MOVES} times in one round trip")


# ---------------------------------------------------------------- blocking reads


def split_read(command: Command) -> list[Command]:
    """Split an XREAD over several slots into one for each slot, without BLOCK; return any other command unchanged."""
    if command[0] != "XREAD":
        return [command]
    at = command.index("STREAMS") + 1
    names, ids = command[at : (at + len(command)) // 2], command[(at + len(command)) // 2 :]
    by_slot: dict[int | None, list[int]] = {}
    for place, name in enumerate(names):
        by_slot.setdefault(slot_of(("", name)), []).append(place)
    if len(by_slot) < 2:
        return [command]
    head = command[: command.index("BLOCK")] if "BLOCK" in command else command[: at - 1]
    return [
        (*head, "STREAMS", *(names[place] for place in places), *(ids[place] for place in places))
        for places in by_slot.values()
    ]


def block_s(command: Command) -> float:
    """Return how long an XREAD may block, in seconds."""
    return float(command[command.index("BLOCK") + 1]) / 1000 if "BLOCK" in command else 0.0
