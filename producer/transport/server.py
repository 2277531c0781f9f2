"""Round trips to one server, or to the primary behind Sentinels: connect, send, retry, fail. Without I/O."""

from collections import deque
from dataclasses import replace

from sluice.producer.operations.operation import Ask, Sleep
from sluice.producer.transport.actions import (
    Connect,
    Connection,
    Receive,
    Release,
    Routine,
    Send,
    SendAndReceive,
)
from sluice.producer.transport.retries import LinkSettings, Retries, checked
from sluice.protocol.redis.error_kinds import CONNECTION_ERRORS, NODE_ERRORS
from sluice.protocol.redis.execution import Reply, resend, unknown_scripts, with_source

MAX_IN_FLIGHT = 4
"""Asks that a pipe sends ahead of their replies: the server works on one while the next is packed."""


class Server:
    """One server, as a link sees it. Changes with the first connection."""

    def __init__(self, settings: LinkSettings) -> None:
        self.settings = settings
        self._has_connected = False

    def ask(self, ask: Ask) -> Routine[list[Reply]]:
        """Make a round trip, and repeat it while the server does not answer.

        Raises:
            QueueUnreachable: there is no reply within `patience_s`, or before the first connection.
            ResultTimeout: there is none before the deadline of the ask.
            QueueRefused, QueueFull: the server refuses a command.
        """
        with self.retries(ask.deadline_s) as retries:
            while True:
                try:
                    return checked(ask, (yield from self.exchange(ask)), self.settings.url)
                except NODE_ERRORS as error:
                    yield Sleep(retries.next_delay_s(error, is_repeatable=ask.is_repeatable))

    def exchange(self, ask: Ask) -> Routine[list[Reply]]:
        """Make a round trip on one connection, once; an error reply is an exception in its place."""
        connection = yield from self.connect()
        try:
            replies = yield SendAndReceive(connection, ask.commands)
            if again := resend(ask.commands, replies, is_repeatable=ask.is_repeatable):
                replies = again.merge(replies, (yield SendAndReceive(connection, again.commands)))
        except GeneratorExit:
            raise  # nobody carries out actions any more; the pool does not hold the connection
        except BaseException:
            yield Release(connection)
            raise
        yield Release(connection)
        return replies

    def connect(self) -> Routine[Connection]:
        """Take a connection."""
        connection = yield Connect(self.settings.url)
        self._has_connected = True
        return connection

    def retries(self, deadline_s: float | None = None) -> Retries:
        """Start the tries of a round trip."""
        return Retries(self.settings, self._has_connected, deadline_s)

    def pipe(self) -> "ServerPipe":
        """Open a pipe on one connection."""
        return ServerPipe(self)


class ServerPipe:
    """Asks in flight on one connection, answered in order. After a lost connection all of them are sent again."""

    has_connection = True
    """Whether it holds a connection from its first ask to its end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._url = server.settings.url
        self._connection: Connection | None = None
        self._in_flight: deque[Ask] = deque()

    @property
    def is_full(self) -> bool:
        """Whether a reply should be read before more is sent."""
        return len(self._in_flight) >= MAX_IN_FLIGHT

    def send(self, ask: Ask) -> Routine[None]:
        """Send without waiting for the replies."""
        self._in_flight.append(ask)
        if self._connection is not None:
            try:
                yield Send(self._connection, ask.commands)
            except CONNECTION_ERRORS:
                yield from self._drop()  # receive connects, and sends all that is in flight

    def receive(self) -> Routine[list[Reply]]:
        """Wait for the replies to the oldest ask in flight.

        Raises:
            QueueUnreachable, QueueRefused, QueueFull: as in `Server.ask`.
        """
        with self._server.retries() as retries:
            while True:
                try:
                    replies = checked(self._in_flight[0], (yield from self._oldest()), self._url)
                except NODE_ERRORS as error:
                    yield from self._drop()
                    yield Sleep(retries.next_delay_s(error))
                else:
                    self._in_flight.popleft()
                    return replies

    def close(self) -> Routine[None]:
        """Release the connection; close it if replies are still to come."""
        if self._in_flight:
            yield from self._drop()
        elif self._connection is not None:
            yield Release(self._connection)
            self._connection = None

    def _oldest(self) -> Routine[list[Reply]]:
        if self._connection is None:
            self._connection = yield from self._server.connect()
            yield self._send_all(self._connection)
        oldest, *rest = self._in_flight
        replies = yield Receive(self._connection, len(oldest.commands))
        if not unknown_scripts(replies):
            return replies
        # The asks behind it may have failed in the same way: read their replies, and send all again with the sources.
        for ask in rest:
            yield Receive(self._connection, len(ask.commands))
        self._in_flight = deque(_with_sources(ask) for ask in self._in_flight)
        yield self._send_all(self._connection)
        return (yield Receive(self._connection, len(oldest.commands)))

    def _send_all(self, connection: Connection) -> Send:
        return Send(connection, [command for ask in self._in_flight for command in ask.commands])

    def _drop(self) -> Routine[None]:
        if self._connection is not None:
            yield Release(self._connection, is_broken=True)
            self._connection = None


def _with_sources(ask: Ask) -> Ask:
    return replace(ask, commands=tuple(map(with_source, ask.commands)))
