"""A Redis Cluster behind the calls of one redis-py client: each command goes to the shard of its partition.

Each shard has a separate client, made as any other. Commands are repeated only where a shard refuses them as MOVED.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from redis.commands import CoreCommands
from redis.exceptions import ClusterDownError, RedisError

from sluice.producer.contract.transport.drivers import drive
from sluice.producer.contract.transport.execution import Command, Reply, run_commands
from sluice.producer.contract.transport.routing import Router, Routing, ShardRequest
from sluice.producer.contract.transport.slot_table import NotACluster
from sluice.producer.contract.transport.urls import Address, ClusterUrl
from sluice.worker.errors import ConfigError

Node = Any  # redis-py's clients share no typed base
Result = TypeVar("Result")

UNAVAILABLE = (RedisError, OSError)
"""After any error of a node, the next one is asked for the slot map."""


class ClusterClient(CoreCommands):
    """A client of all shards, for one thread."""

    _event_dispatcher: Any = None  # redis-py's commands read it

    def __init__(self, url: ClusterUrl, make: Callable[[str], Node]) -> None:
        self._url = url
        self._make = make
        self._nodes: dict[Address, Node] = {}
        self._router = Router(url.seeds, UNAVAILABLE)

    @property
    def connection_pool(self) -> "ClusterClient":
        """The client itself, which closes connections as redis-py's pools do."""
        return self

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Close every connection. Safe from any thread."""
        for node in list(self._nodes.values()):
            node.connection_pool.disconnect(inuse_connections=inuse_connections)

    def shards(self) -> list[Node]:
        """Return a client for each shard.

        Raises:
            RedisError: no node answers.
        """
        return [self._node(address) for address in self._drive(self._router.shards(), self._send)]

    def execute_command(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # as redis-py has it
        """Run one command on the shard of its key, or on any shard if it has none.

        Raises:
            RedisError: from the shard, or it does not answer.
        """

        def send(request: ShardRequest) -> list[Reply]:
            return [self._node(request.address).execute_command(*args, **options)]

        return self._drive(self._router.single(args), send)

    def scan_iter(self, *args: Any, **options: Any) -> Iterator[Any]:  # noqa: ANN401  # as redis-py has it
        """Yield the keys of all shards.

        Raises:
            RedisError: a shard does not answer.
        """
        for node in self.shards():
            yield from node.scan_iter(*args, **options)

    def pipeline(self, transaction: bool = False) -> "ClusterPipeline":
        """Collect commands for one round trip to each shard."""
        assert not transaction, "shards share no transaction"
        return ClusterPipeline(self)

    def run(self, commands: Sequence[Command]) -> list[Reply]:
        """Make one round trip to each shard; an error is the reply of its command.

        Where a shard does not answer, ClusterDownError is the reply of its commands; the others have theirs.

        Raises:
            RedisError: no node answers.
        """
        return self._drive(self._router.round_trip(commands), self._send_to_shard)

    def _drive(self, routing: Routing[Result], send: Callable[[ShardRequest], Sequence[Reply]]) -> Result:
        """Run a router's generator; `send` sends what does not read the slot map."""

        def perform(requests: Sequence[ShardRequest]) -> list[Sequence[Reply]]:
            return [(self._send if one.reads_slots else send)(one) for one in requests]

        try:
            return drive(routing, perform)
        except NotACluster as error:
            raise ConfigError([str(error)]) from error

    def _send(self, request: ShardRequest) -> list[Reply]:
        return run_commands(self._node(request.address), request.commands)

    def _send_to_shard(self, request: ShardRequest) -> list[Reply]:
        try:
            return self._send(request)
        except UNAVAILABLE as error:
            self._router.failed(request.address)
            host, port = request.address
            down = ClusterDownError(f"CLUSTERDOWN the shard at {host}:{port} does not answer: {error}")
            return [down] * len(request.commands)

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
        """Add a command."""
        self._commands.append(args)

    def execute(self, raise_on_error: bool = True) -> list[Reply]:
        """Run all commands; the first error is raised, or each is a reply in its place."""
        commands, self._commands = self._commands, []
        replies = self._client.run(commands)
        if raise_on_error and (error := next((one for one in replies if isinstance(one, Exception)), None)):
            raise error
        return replies
