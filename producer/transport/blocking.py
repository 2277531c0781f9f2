# Generated from producer/transport/aio.py by `python -m tools.blocking`: change that file.

"""Runners of operations: they make the round trips, and repeat repeatable ones while the server is unreachable."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar, cast

from sluice.producer.errors import InvalidSetting, ProducerError
from sluice.producer.operations.operation import STEPS, Ask, Operation, Read, Sleep, Step, channel_entries, first_ask
from sluice.producer.transport.retries import LinkSettings, Retries, checked
from sluice.protocol.redis import urls
from sluice.protocol.redis.blocking import Cluster, Server
from sluice.protocol.redis.connections import Connection
from sluice.protocol.redis.error_kinds import CONNECTION_ERRORS, NODE_ERRORS
from sluice.protocol.redis.execution import Command, Reply, unknown_scripts, with_source
from sluice.protocol.redis.pools import Pool
from sluice.protocol.redis.routing import NotACluster, block_s, split_read

MAX_IN_FLIGHT = 4
"""Most asks that a pipe sends ahead of their replies, so that the server works on one while the next is packed."""

POLL_S = 0.02
"""Time after which a read of channels on several shards, which cannot block, is repeated."""

Result = TypeVar("Result")
Event = TypeVar("Event")


class Runner:
    """A runner of operations on one server or Cluster; base class of the links.

    Args:
        settings: The address, and how long to retry.
        pool_of: Returns the pool of a URL.

    Raises:
        InvalidSetting: the URL cannot be read.
    """

    def __init__(self, settings: LinkSettings, pool_of: Callable[[str], Pool]) -> None:
        self.settings = settings
        self.server: Server | Cluster
        if not urls.is_cluster(settings.url):
            self.server = Server(settings.url, pool_of, settings.revive)
            return
        try:
            url = urls.read_cluster_url(settings.url)
        except ValueError as error:
            raise urls.cannot_read(settings.url, error) from None
        self.server = Cluster(url, lambda node: Server(node, pool_of))

    def run(self, operation: Operation[Result], replies: list[Reply] | None = None) -> Result:
        """Run an operation to its result; `replies`: to the ask at which it stopped, if it has been started."""
        result: Any = replies  # Any: each step has its own result
        try:
            step = operation.send(result)
            while True:
                try:
                    result = self.perform(step)
                except BaseException as error:  # noqa: BLE001  # the operation decides
                    step = operation.throw(error)
                else:
                    step = operation.send(result)
        except StopIteration as stop:
            return stop.value

    def groups(self, operation: Generator[Step | Event, list[Reply], None]) -> Generator[list[Event]]:
        """Run an operation that also yields events; yield the events between two steps as a group."""
        group: list[Event] = []
        try:
            yielded = next(operation)
            while True:
                step = _next_step(operation, yielded, group)
                if group:
                    yield group
                    group = []
                try:
                    result = self.perform(step)
                except BaseException as error:  # noqa: BLE001  # thrown into the operation, which decides
                    yielded = operation.throw(error)
                else:
                    yielded = operation.send(result)
        except (StopIteration, ProducerError) as end:
            if group:
                yield group
            if isinstance(end, ProducerError):
                raise

    def run_ahead(self, operations: Iterable[Operation[Result]]) -> Generator[Result]:
        """Run operations that begin with a round trip, which is sent before the replies to earlier ones arrive.

        Yield their results, in order. On a Cluster, they run one after the other.
        """
        if isinstance(self.server, Cluster):
            for operation in operations:
                yield self.run(operation)
            return
        running = deque[Operation[Result]]()
        with self.pipe() as pipe:
            for operation in operations:
                running.append(operation)
                pipe.send(first_ask(operation))
                if pipe.is_full:
                    yield self.run(running.popleft(), pipe.receive())
            while running:
                yield self.run(running.popleft(), pipe.receive())

    def perform(self, step: Step) -> Any:  # noqa: ANN401  # depends on the kind of step
        """Perform one step; return its result."""
        match step:
            case Ask():
                return self.ask(step)
            case Read():
                return self.read(step)
            case Sleep(seconds):
                time.sleep(seconds)
        return None

    def ask(self, ask: Ask) -> list[Reply]:
        """Send the commands, and wait for the replies.

        Raises:
            QueueUnreachable: no reply within `patience_s`, or no first connection.
            ResultTimeout: no reply before the deadline of the ask.
            QueueRefused, QueueFull: the server refuses a command.
            InvalidSetting: a node is not one of a Cluster.
        """
        reads = split_read(ask.commands[0]) if isinstance(self.server, Cluster) else ()
        if len(reads) > 1:
            return [self._read_all(replace(ask, commands=tuple(reads)), block_s(ask.commands[0]))]
        return self._ask(ask)

    def read(self, read: Read) -> Any:  # noqa: ANN401  # what the operation asked for
        """Read channels."""
        [reply] = self.ask(read.ask)
        return list(channel_entries(reply))

    @contextmanager
    def pipe(self) -> Generator["Pipe"]:
        """Open a connection on which asks are sent ahead of their replies. Not for a Cluster."""
        assert isinstance(self.server, Server)
        pipe = Pipe(self.server, self.settings)
        try:
            yield pipe
        finally:
            pipe.close()

    def _ask(self, ask: Ask) -> list[Reply]:
        with Retries(self.settings, self.server.has_connected, ask.deadline_s) as retries:
            while True:
                try:
                    replies = self.server.exchange(ask.commands, is_repeatable=ask.is_repeatable)
                    return checked(ask, replies, self.settings.url)
                except NODE_ERRORS as error:
                    self.server.forget()
                    time.sleep(retries.next_delay_s(error, is_repeatable=ask.is_repeatable))
                except NotACluster as error:
                    raise InvalidSetting(f"{urls.redacted(self.settings.url)}: {error}.") from error

    def _read_all(self, reads: Ask, wait_s: float) -> Reply:
        """Repeat XREADs of several slots until one has entries; return their replies as one."""
        until_s = monotonic() + wait_s
        while True:
            replies = self._ask(reads)
            rows = [row for reply in replies for row in cast("list[Reply] | None", reply) or []]
            if rows or monotonic() >= until_s:
                return rows or None
            time.sleep(POLL_S)


def _next_step(
    operation: Generator[Step | Event, list[Reply], None], yielded: Step | Event, group: list[Event]
) -> Step:
    """Return the next step of an operation, from `yielded` on; add the events before it to the group."""
    while not isinstance(yielded, STEPS):
        group.append(cast("Event", yielded))
        yielded = next(operation)
    return yielded


class Pipe:
    """Asks in flight on one connection, answered in order. After a lost connection, all are sent again."""

    def __init__(self, server: Server, settings: LinkSettings) -> None:
        self._server = server
        self._settings = settings
        self._connection: Connection | None = None
        self._in_flight: deque[Ask] = deque()

    @property
    def is_full(self) -> bool:
        """Whether a reply must be read before more is sent."""
        return len(self._in_flight) >= MAX_IN_FLIGHT

    def send(self, ask: Ask) -> None:
        """Send commands without waiting for the replies."""
        self._in_flight.append(ask)
        if self._connection is not None:
            try:
                self._connection.send_commands(ask.commands)
            except CONNECTION_ERRORS:
                self._drop()  # `receive` reconnects, and sends all asks in flight

    def receive(self) -> list[Reply]:
        """Wait for the replies to the oldest ask in flight.

        Raises:
            QueueUnreachable, QueueRefused, QueueFull: as in `Runner.ask`.
        """
        with Retries(self._settings, self._server.has_connected) as retries:
            while True:
                try:
                    replies = checked(self._in_flight[0], self._oldest(), self._settings.url)
                except NODE_ERRORS as error:
                    self._drop()
                    time.sleep(retries.next_delay_s(error))
                else:
                    self._in_flight.popleft()
                    return replies

    def close(self) -> None:
        """Release the connection, which is closed if replies are outstanding."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()

    def _oldest(self) -> list[Reply]:
        connection = self._connection
        if connection is None:
            connection = self._connection = self._server.connect()
            connection.send_commands(self._commands())
        oldest, *rest = self._in_flight
        replies = connection.read_replies(len(oldest.commands))
        if not unknown_scripts(replies):
            return replies
        # Later asks may have failed in the same way: read their replies, and send all again with the sources.
        for ask in rest:
            connection.read_replies(len(ask.commands))
        self._in_flight = deque(_with_sources(ask) for ask in self._in_flight)
        connection.send_commands(self._commands())
        return connection.read_replies(len(oldest.commands))

    def _commands(self) -> list[Command]:
        return [command for ask in self._in_flight for command in ask.commands]

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()


def _with_sources(ask: Ask) -> Ask:
    return replace(ask, commands=tuple(map(with_source, ask.commands)))
