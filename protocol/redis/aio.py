"""Round trips to one server, to the primary behind Sentinels, or to the shards of a Cluster. No retries.

All keys of a partition are in one slot, and a command is sent to the shard of its first key. A command that a shard
refuses as MOVED has not run there: the slot map is read again, and the command is sent to its new shard. After
`NODE_ERRORS`, the slot map is read again, too, and the failed node is asked last.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from redis.exceptions import ConnectionError as RedisConnectionError

from sluice.protocol.redis.connections import Connection
from sluice.protocol.redis.error_kinds import CONNECTION_ERRORS, NODE_ERRORS, ErrorKind, classify
from sluice.protocol.redis.execution import Command, Reply, unknown_scripts, with_source
from sluice.protocol.redis.pools import Pool
from sluice.protocol.redis.routing import (
    CLUSTER_SLOTS,
    MAX_MOVES,
    Outcome,
    ShardedRoundTrip,
    ShardRequest,
    SlotTable,
    keeps_moving,
    replies_of,
)
from sluice.protocol.redis.urls import Address, ClusterUrl


class AsyncServer:
    """One server, or the primary behind Sentinels.

    Args:
        url: The URL of the server.
        pool_of: Returns the pool of a URL.
        revive: Restarts the server if it has stopped; None if it is not an embedded server.
    """

    def __init__(self, url: str, pool_of: Callable[[str], Pool], revive: Callable[[], None] | None = None) -> None:
        self._url = url
        self._pool_of = pool_of
        self._revive = revive
        self.has_connected = False
        """Whether the server has been reached before."""

    async def connect(self) -> Connection:
        """Take a connection; return it by its `release` or `drop`.

        Raises:
            RedisError, OSError: the server cannot be reached, or refuses.
        """
        pool = self._pool_of(self._url)
        try:
            connection = await pool.get_connection()
        except CONNECTION_ERRORS:
            if self._revive is None:
                raise
            await asyncio.to_thread(self._revive)
            connection = await pool.get_connection()
        self.has_connected = True
        return connection

    async def exchange(self, commands: Sequence[Command], *, is_repeatable: bool = False) -> list[Reply]:
        """Make a round trip; an error reply is returned in its place, as an exception.

        Args:
            commands: The commands.
            is_repeatable: If the server lacks a script, send all commands again, since a reply (WAIT) may depend on
                earlier commands; otherwise only the calls that did not run.

        Raises:
            RedisError, OSError: no replies were received.
        """
        connection = await self.connect()
        try:
            await connection.send_commands(commands)
            replies = await connection.read_replies(len(commands))
            if unknown := unknown_scripts(replies):
                places = range(len(replies)) if is_repeatable else unknown
                await connection.send_commands([with_source(commands[place]) for place in places])
                for place, reply in zip(places, await connection.read_replies(len(places)), strict=True):
                    replies[place] = reply
        except GeneratorExit:
            raise  # the event loop of this coroutine has ended
        except BaseException:
            await connection.release()
            raise
        await connection.release()
        return replies

    def forget(self) -> None:
        """Do nothing: a pool has no cached addresses, as it asks its Sentinels for each connection."""


class AsyncCluster:
    """The shards of a Cluster, each created at its first use. Changes as nodes fail and slots move.

    Args:
        url: The URL of the Cluster.
        make: Creates a node from its URL.
    """

    def __init__(self, url: ClusterUrl, make: Callable[[str], AsyncServer]) -> None:
        self._url = url
        self._make = make
        self._nodes: dict[Address, AsyncServer] = {}
        self._primaries: tuple[Address, ...] = ()
        self._failed: tuple[Address, ...] = ()  # asked last for the slot map; never mutated, since threads share it
        self._table: SlotTable | None = None
        self.has_connected = False
        """Whether a node has returned the slot map before."""

    @property
    def nodes(self) -> list[AsyncServer]:
        """The nodes created so far."""
        return list(self._nodes.values())

    def forget(self) -> None:
        """Read the slot map again before the next request."""
        self._table = None

    async def shards(self) -> list[AsyncServer]:
        """Return each shard's primary.

        Raises:
            RedisError, OSError: no node returns the slot map.
            NotACluster: a node is not one of a Cluster.
        """
        return [self._node(address) for address in (await self._slots()).addresses]

    async def exchange(
        self, commands: Sequence[Command], *, is_repeatable: bool = False, is_partial: bool = False
    ) -> list[Reply]:
        """Send each command to its shard, to all shards concurrently; return one reply for each command.

        Args:
            commands: The commands. A SCAN goes from shard to shard: its cursor is `SHARD:CURSOR`.
            is_repeatable: As in `AsyncServer.exchange`.
            is_partial: Whether a shard may be unreachable; then ClusterDownError is the reply to each of its commands.

        Raises:
            RedisError, OSError: no node returns the slot map, slots keep moving, or, unless `is_partial`, a shard does
                not answer.
            NotACluster: a node is not one of a Cluster.
        """
        if commands[0][0] == "SCAN":
            return [await self._scan(commands[0])]
        trip = ShardedRoundTrip(commands)
        for _ in range(MAX_MOVES):
            requests = trip.requests(await self._slots())
            waiting = [self._outcome(request, is_repeatable=is_repeatable) for request in requests]
            outcomes = await asyncio.gather(*waiting)
            for request, outcome in zip(requests, outcomes, strict=True):
                trip.receive(request, replies_of(request, outcome, is_partial=is_partial))
            if trip.is_done:
                return trip.replies()
            self.forget()
        raise keeps_moving()

    async def _scan(self, command: Command) -> Reply:
        name, cursor, *rest = command
        shard, _, cursor_there = str(cursor, "ascii").rpartition(":") if isinstance(cursor, bytes) else ("", "", cursor)
        place, shards = int(shard or 0), await self.shards()
        [reply] = await shards[place].exchange(((name, cursor_there, *rest),))
        if isinstance(reply, Exception):
            return reply
        next_cursor, names = cast("tuple[bytes, list[bytes]]", reply)
        if next_cursor != b"0":
            return [b"%d:%s" % (place, next_cursor), names]
        return [b"0" if place + 1 == len(shards) else b"%d:0" % (place + 1), names]

    async def _outcome(self, request: ShardRequest, *, is_repeatable: bool = False) -> Outcome:
        try:
            return await self._node(request.address).exchange(request.commands, is_repeatable=is_repeatable)
        except NODE_ERRORS as error:
            self.forget()
            self._failed = (*(node for node in self._failed if node != request.address), request.address)
            return error

    def _node(self, address: Address) -> AsyncServer:
        if address not in self._nodes:
            self._nodes[address] = self._make(self._url.url_of(address))
        return self._nodes[address]

    async def _slots(self) -> SlotTable:
        table = self._table  # read once: another thread may forget it
        if table is None:
            table = self._table = await self._read_slots()
        return table

    async def _read_slots(self) -> SlotTable:
        problem: Exception = RedisConnectionError("CLUSTERDOWN no shard serves any slot")
        for address in self._nodes_to_ask():
            outcome = await self._outcome(ShardRequest(address, (CLUSTER_SLOTS,)))
            reply = outcome if isinstance(outcome, Exception) else outcome[0]
            if isinstance(reply, Exception) and (reply is outcome or classify(reply) is not ErrorKind.OTHER):
                problem = reply
                continue
            table = SlotTable.read(reply, address)
            if table.addresses:
                self._primaries = tuple(table.addresses)
                others = {*table.addresses, *self._url.seeds} - {address}
                self._failed = tuple(node for node in self._failed if node in others)
                self.has_connected = True
                return table
        raise problem

    def _nodes_to_ask(self) -> list[Address]:
        """Return the primaries of the newest slot map and the seeds, those that failed last."""
        nodes, failed = dict.fromkeys((*self._primaries, *self._url.seeds)), self._failed
        return [*(node for node in nodes if node not in failed), *(node for node in failed if node in nodes)]
