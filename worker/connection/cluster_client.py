"""A Redis Cluster behind the calls of one redis-py client: each command goes to the shard of its partition.

Each shard has a separate client, made as any other. Commands are repeated only where a shard refuses them as MOVED.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from redis.commands import CoreCommands
from redis.exceptions import ResponseError

from sluice.protocol.redis.cluster import ClusterDriver
from sluice.protocol.redis.drivers import drive
from sluice.protocol.redis.execution import Command, Reply, run_commands
from sluice.protocol.redis.routing import Routing
from sluice.protocol.redis.slot_table import NotACluster
from sluice.protocol.redis.urls import ClusterUrl
from sluice.worker.errors import ConfigError

Node = Any  # redis-py's clients share no typed base
Result = TypeVar("Result")

RoundTrip: TypeAlias = Callable[[], list[Reply]]
"""A blocking round trip to one node; an error reply is an exception in its place."""

Send: TypeAlias = Callable[[Node, tuple[Command, ...]], list[Reply]]


class ClusterClient(CoreCommands):
    """A client of all shards, for one thread."""

    _event_dispatcher: Any = None  # redis-py's commands read it

    def __init__(self, url: ClusterUrl, make: Callable[[str], Node]) -> None:
        self._driver = ClusterDriver(url, make)
        self._router = self._driver.router

    @property
    def connection_pool(self) -> "ClusterClient":
        """The client itself, which closes connections as redis-py's pools do."""
        return self

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Close every connection. Safe from any thread."""
        for node in self._driver.nodes:
            node.connection_pool.disconnect(inuse_connections=inuse_connections)

    def shards(self) -> list[Node]:
        """Return a client for each shard.

        Raises:
            RedisError, OSError: no node answers.
        """
        return [self._driver.node(address) for address in self._run(self._router.shards())]

    def execute_command(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # as redis-py has it
        """Run one command on the shard of its key, or on any shard if it has none.

        Raises:
            RedisError, OSError: from the shard, or it does not answer.
        """

        def send(node: Node, commands: tuple[Command, ...]) -> list[Reply]:
            [command] = commands
            try:
                return [node.execute_command(*command, **options)]
            except ResponseError as error:
                return [error]

        return self._run(self._router.single(args), send)

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
            RedisError, OSError: no node answers.
        """
        return self._run(self._router.round_trip(commands, is_partial=True))

    def _run(self, routing: Routing[Result], send: Send = run_commands) -> Result:
        def exchange(node: Node, commands: tuple[Command, ...]) -> Generator[RoundTrip, list[Reply], list[Reply]]:
            return (yield partial(send, node, commands))

        try:
            return drive(self._driver.run(routing, exchange), _perform)
        except NotACluster as error:
            raise ConfigError([str(error)]) from error


def _perform(round_trip: RoundTrip) -> list[Reply]:
    return round_trip()


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
