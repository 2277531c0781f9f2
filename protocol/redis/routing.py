"""Route round trips to the shards of a Redis Cluster. Without I/O: used by producers and workers.

A router's methods are routines, which `cluster.py` drives. An action is the requests to send, one for each shard; its
result is their outcomes in the same order. These requests are independent and may be sent at the same time. A command
that a shard refuses as MOVED has not run there: the router reads the slot map again and sends the command to its new
shard. A node without replies (`NODE_ERRORS`) is asked last for the slot map, which is read again.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, cast

from redis.exceptions import AskError, ClusterDownError, MovedError
from redis.exceptions import ConnectionError as RedisConnectionError

from sluice.protocol.redis.error_kinds import ErrorKind, classify
from sluice.protocol.redis.execution import Command, Reply
from sluice.protocol.redis.slot_table import CLUSTER_SLOTS, SlotTable, slot_of
from sluice.protocol.redis.urls import Address

MAX_MOVES = 5
"""Reads of the slot map for one round trip."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """The commands of a round trip that go to one shard."""

    address: Address
    commands: tuple[Command, ...]
    places: tuple[int, ...] = (0,)
    """Where the commands stand in the round trip."""


Outcome: TypeAlias = Sequence[Reply] | Exception
"""The replies to a request, or one of `NODE_ERRORS`: why there are none."""

Routing: TypeAlias = Generator[Sequence[ShardRequest], Sequence[Outcome], Result]
"""Yields requests, is sent the outcome of each, and returns a result."""


@dataclass(frozen=True, slots=True)
class ShardReplies:
    """The replies of all shards to one command without a key, where they differ."""

    replies: tuple[Reply, ...]


@dataclass(slots=True)
class ShardedRoundTrip:
    """One round trip that is cut by shard, and the replies so far.

    A command without a key goes to every shard of the round trip, after that shard's other commands; to any one shard
    if no command has a key. So a WAIT covers all writes of the round trip.
    """

    commands: Sequence[Command]
    _replies: dict[int, list[Reply]] = field(default_factory=dict[int, list[Reply]])

    def requests(self, table: SlotTable) -> list[ShardRequest]:
        """Return what is still to be sent; a command for a slot without a shard has ClusterDownError as its reply."""
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
        """Take a shard's replies; commands refused as MOVED are requested again.

        Raises:
            RedisConnectionError: a slot is being moved between two shards.
        """
        ran = {place: reply for place, reply in zip(request.places, replies, strict=True) if not _has_moved(reply)}
        keyed = [place for place in request.places if slot_of(self.commands[place]) is not None]
        if keyed and not any(place in ran for place in keyed):
            return  # nothing ran on this shard, so its replies to commands without a key do not count
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
    """Join the replies of several shards: the first error, else the least of counts (WAIT, WAITAOF), else all."""
    errors = [reply for reply in replies if isinstance(reply, Exception)]
    if errors or len(replies) == 1:
        return (errors or replies)[0]
    if all(isinstance(reply, int) for reply in replies):
        return min(cast("list[int]", replies))
    if all(_is_counts(reply) for reply in replies):
        return [min(counts) for counts in zip(*cast("list[list[int]]", replies), strict=True)]
    return replies[0] if all(reply == replies[0] for reply in replies) else ShardReplies(tuple(replies))


def _is_counts(reply: Reply) -> bool:
    return isinstance(reply, list) and all(isinstance(one, int) for one in cast("list[object]", reply))


class Router:
    """The slot map of one Cluster, and which nodes answer. Changes as nodes fail and slots move.

    Args:
        seeds: The nodes to ask first.
    """

    def __init__(self, seeds: Iterable[Address]) -> None:
        self._seeds = tuple(seeds)
        self._primaries: tuple[Address, ...] = ()
        self._failed: tuple[Address, ...] = ()  # asked last for the slot map; replaced, since threads share a router
        self._table: SlotTable | None = None
        self.has_connected = False
        """Whether a node has returned the slot map."""

    def forget(self) -> None:
        """Read the slot map again before the next request."""
        self._table = None

    def shards(self) -> Routing[list[Address]]:
        """Find each shard's primary.

        Raises:
            RedisError, OSError: no node returns the slot map.
            NotACluster: the URL is not a Cluster's.
        """
        return (yield from self._slots()).addresses

    def round_trip(self, commands: Sequence[Command], *, is_partial: bool = False) -> Routing[list[Reply]]:
        """Send each command to its shard; return one reply for each.

        Args:
            commands: The commands.
            is_partial: Where a shard does not answer, ClusterDownError is the reply to its commands, and the others
                have theirs.

        Raises:
            RedisError, OSError: no node returns the slot map, slots keep moving, or, unless `is_partial`, a shard does
                not answer.
            NotACluster: the URL is not a Cluster's.
        """
        trip = ShardedRoundTrip(commands)
        for _ in range(MAX_MOVES):
            requests = trip.requests((yield from self._slots()))
            for request, outcome in zip(requests, (yield from self._ask(requests)), strict=True):
                trip.receive(request, _replies(request, outcome, is_partial=is_partial))
            if trip.is_done:
                return trip.replies()
            self.forget()
        raise _keeps_moving()

    def single(self, command: Command) -> Routing[Reply]:
        """Send one command to its shard, or to any shard if it has no key, and return its reply.

        Raises:
            RedisError, OSError: from the shard, or no shard serves its slot.
            NotACluster: the URL is not a Cluster's.
        """
        for _ in range(MAX_MOVES):
            request = ShardRequest((yield from self._address_of(command)), (command,))
            [outcome] = yield from self._ask([request])
            [reply] = _replies(request, outcome)
            if not isinstance(reply, Exception):
                return reply
            if not isinstance(reply, MovedError):
                raise reply
            self.forget()
        raise _keeps_moving()

    def _ask(self, requests: Sequence[ShardRequest]) -> Routing[Sequence[Outcome]]:
        """Make requests, and note which nodes have not answered."""
        outcomes = (yield requests) if requests else ()
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._failed_at(request.address)
        return outcomes

    def _failed_at(self, address: Address) -> None:
        self.forget()
        self._failed = (*(node for node in self._failed if node != address), address)

    def _address_of(self, command: Command) -> Routing[Address]:
        slot, table = slot_of(command), (yield from self._slots())
        if slot is None:
            return table.addresses[0]
        address = table.shard_of(slot)
        if address is None:
            self.forget()
            raise slot_without_shard(slot)
        return address

    def _slots(self) -> Routing[SlotTable]:
        table = self._table  # read once: another thread may forget it
        if table is None:
            table = self._table = yield from self._read_slots()
        return table

    def _read_slots(self) -> Routing[SlotTable]:
        problem: Exception = RedisConnectionError("CLUSTERDOWN no shard serves any slot")
        for address in self._nodes_to_ask():
            [outcome] = yield from self._ask([ShardRequest(address, (CLUSTER_SLOTS,))])
            reply = outcome if isinstance(outcome, Exception) else outcome[0]
            if isinstance(reply, Exception) and (reply is outcome or classify(reply) is not ErrorKind.OTHER):
                problem = reply
                continue
            table = SlotTable.read(reply, address)
            if table.addresses:
                self._primaries = tuple(table.addresses)
                others = {*table.addresses, *self._seeds} - {address}
                self._failed = tuple(node for node in self._failed if node in others)
                self.has_connected = True
                return table
        raise problem

    def _nodes_to_ask(self) -> list[Address]:
        """Return the primaries of the newest slot map and the seeds, those that failed last."""
        known, failed = dict.fromkeys((*self._primaries, *self._seeds)), self._failed
        return [*(node for node in known if node not in failed), *(node for node in failed if node in known)]


def _replies(request: ShardRequest, outcome: Outcome, *, is_partial: bool = False) -> Sequence[Reply]:
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


def _keeps_moving() -> RedisConnectionError:
    return RedisConnectionError(f"CLUSTERDOWN slots moved {MAX_MOVES} times in one round trip")


# ---------------------------------------------------------------- blocking reads


def split_read(command: Command) -> list[Command]:
    """Split an XREAD of several slots into one for each slot, without BLOCK; return any other command alone."""
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
    """Return for how long an XREAD may block."""
    return float(command[command.index("BLOCK") + 1]) / 1000 if "BLOCK" in command else 0.0
