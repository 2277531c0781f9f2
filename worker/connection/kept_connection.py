"""A connection that one thread keeps for its round trips. Knows no scripts and no keys.

A pipeline of redis-py takes a connection from a pool and returns it, and does so with the bookkeeping of retries and
metrics. On a machine whose caches hold a model's weights that costs twice as much as the round trip itself.
"""

from collections.abc import Sequence
from typing import Any

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from sluice.protocol.redis.execution import Command, Reply, RoundTripper
from sluice.worker.connection.clients import Client


def keeping(client: Client) -> Client:
    """Return what makes the round trips of a thread: over a kept connection, or a Cluster's client itself."""
    return KeptConnection(client) if isinstance(client, Redis) else client


class KeptConnection(RoundTripper):
    """A connection of a client's pool, which closes it. Changes with each round trip."""

    def __init__(self, client: "Redis") -> None:
        """Take no connection yet."""
        self._pool: Any = client.connection_pool  # redis-py's pools share no typed base
        self._connection: Any = None  # as above

    def run(self, commands: Sequence[Command]) -> list[Reply]:
        """Make one round trip; an error reply is returned in its place, not raised.

        Raises:
            RedisError, OSError: from the connection. The next round trip makes a new one.
        """
        connection = self._ready()
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            return [_reply(connection) for _ in commands]
        except BaseException:
            # Replies that were not read would be taken for those of later commands.
            self._drop()
            raise

    def _ready(self) -> Any:  # noqa: ANN401  # as above
        """Return the connection, made anew if it failed or the server has closed it."""
        if self._connection is not None and _is_closed(self._connection):
            self._drop()
        if self._connection is None:
            self._connection = self._pool.get_connection()
        return self._connection

    def _drop(self) -> None:
        # A connection that is kept without a socket would connect, and wait for that, in `can_read` and again to send.
        connection, self._connection = self._connection, None
        connection.disconnect()
        self._pool.release(connection)


def _is_closed(connection: Any) -> bool:  # noqa: ANN401  # as above
    try:
        return connection.can_read()
    except (RedisError, OSError):
        return True


def _reply(connection: Any) -> Reply:  # noqa: ANN401  # as above
    try:
        return connection.read_response()
    except ResponseError as error:
        return error
