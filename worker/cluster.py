"""A Redis Cluster behind the same calls as one server: each command goes to the shard of its partition.

One client for each shard, made as any other, and none repeats a command by itself. What a shard says has moved was not
carried out there, and goes where it says.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from redis.commands import CoreCommands
from redis.exceptions import ClusterDownError, MovedError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from producer.contract.cluster import (
    LOOK,
    MAX_MOVES,
    Address,
    ClusterUrl,
    Command,
    Part,
    Reply,
    SlotTable,
    Trip,
    slot_of,
)
from worker.errors import ConfigError

Node = Any  # redis-py's clients share no typed base
AWAY = (RedisError, OSError)


class ClusterClient(CoreCommands):
    """A client of one thread for all shards. Changes: it learns who serves what, and forgets it when one is away."""

    _event_dispatcher: Any = None  # redis-py's commands want it named

    def __init__(self, url: ClusterUrl, make: Callable[[str], Node]) -> None:
        self._url = url
        self._make = make
        self._nodes: dict[Address, Node] = {}
        self._table: SlotTable | None = None

    @property
    def connection_pool(self) -> "ClusterClient":
        """As redis-py's clients have it, to close connections."""
        return self

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Close every connection; from any thread."""
        for node in list(self._nodes.values()):
            node.connection_pool.disconnect(inuse_connections=inuse_connections)

    def shards(self) -> list[Node]:
        """A client for each shard.

        Raises:
            RedisError: no node answers.
        """
        return [self._node(address) for address in self._slots().addresses]

    def execute_command(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # as redis-py has it
        """Run one command on the shard of its key, or on any if it has none.

        Raises:
            RedisError: as the shard says, or it is away.
        """
        for _ in range(MAX_MOVES):
            try:
                return self._node(self._address_of(args)).execute_command(*args, **options)
            except MovedError:
                self._table = None
            except (RedisConnectionError, OSError):
                self._table = None
                raise
        raise _keeps_moving()

    def scan_iter(self, *args: Any, **options: Any) -> Iterator[Any]:  # noqa: ANN401  # as redis-py has it
        """The keys of all shards.

        Raises:
            RedisError: a shard does not answer.
        """
        for node in self.shards():
            yield from node.scan_iter(*args, **options)

    def pipeline(self, transaction: bool = False) -> "ClusterPipeline":
        """Commands for one round trip to each shard."""
        assert not transaction, "shards share no transaction"
        return ClusterPipeline(self)

    def run(self, commands: Sequence[Command]) -> list[Reply]:
        """One round trip to each shard; an error, and a shard that is away, is the reply of its commands alone.

        Raises:
            RedisError: no node answers.
        """
        trip = Trip(commands)
        for _ in range(MAX_MOVES):
            for part in trip.parts(self._slots()):
                trip.heard(part, self._send(part))
            if trip.is_done:
                return trip.answer()
            self._table = None
        raise _keeps_moving()

    def _send(self, part: Part) -> list[Reply]:
        pipeline = self._node(part.address).pipeline(transaction=False)
        for command in part.commands:
            pipeline.execute_command(*command)
        try:
            return pipeline.execute(raise_on_error=False)
        except AWAY as error:
            self._table = None
            self._ask_last(part.address)
            host, port = part.address
            away = ClusterDownError(f"CLUSTERDOWN the shard at {host}:{port} does not answer: {error}")
            return [away] * len(part.commands)

    def _address_of(self, command: Command) -> Address:
        slot, table = slot_of(command), self._slots()
        address = table.addresses[0] if slot is None else table.shard_of(slot)
        if address is None:
            self._table = None
            raise ClusterDownError(f"CLUSTERDOWN nobody serves slot {slot}")
        return address

    def _slots(self) -> SlotTable:
        if self._table is None:
            self._table = self._look()
        return self._table

    def _look(self) -> SlotTable:
        """Ask whoever answers first who serves what."""
        problem: Exception | None = None
        for address in dict.fromkeys((*self._nodes, *self._url.seeds)):
            try:
                [reply] = self._node(address).pipeline(transaction=False).execute_command(*LOOK).execute(False)
                table = SlotTable.read(reply, address)
            except ValueError as error:
                raise ConfigError([str(error)]) from error
            except AWAY as error:
                problem = error
                self._ask_last(address)
            else:
                if table.addresses:
                    return table
        raise problem or RedisConnectionError("CLUSTERDOWN no node knows who serves what")

    def _ask_last(self, address: Address) -> None:
        """Of who serves what: waiting for one that is away would cost the others' commands as well."""
        self._nodes[address] = self._nodes.pop(address)

    def _node(self, address: Address) -> Node:
        if address not in self._nodes:
            self._nodes[address] = self._make(self._url.url_of(address))
        return self._nodes[address]


class ClusterPipeline:
    """What is used of redis-py's pipelines."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._commands: list[Command] = []

    def execute_command(self, *args: Any) -> None:  # noqa: ANN401  # as redis-py has it
        """Add one."""
        self._commands.append(args)

    def execute(self, raise_on_error: bool = True) -> list[Reply]:
        """Run all; an error is raised, or a reply in its place."""
        commands, self._commands = self._commands, []
        replies = self._client.run(commands)
        if raise_on_error and (error := next((one for one in replies if isinstance(one, Exception)), None)):
            raise error
        return replies


def _keeps_moving() -> RedisConnectionError:
    return RedisConnectionError(f"CLUSTERDOWN slots moved {MAX_MOVES} times in one round trip")
