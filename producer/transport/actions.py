"""The I/O of a link, as values: the actions that its routines yield (`contract/transport/drivers.py`)."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from sluice.producer.operations.operation import Step
from sluice.protocol.redis.drivers import RunAll
from sluice.protocol.redis.execution import Command

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection in use, and the pool to which it returns."""

    connection: Any  # redis-py's connections share no public typed base
    pool: Any  # nor do its pools


@dataclass(frozen=True, slots=True)
class Connect:
    """A request for a connection from the pool of this URL, connected; the result is a `Connection`."""

    url: str


@dataclass(frozen=True, slots=True)
class SendAndReceive:
    """Commands to send. The result is their replies, an error reply as an exception in its place."""

    connection: Connection
    commands: Sequence[Command]


@dataclass(frozen=True, slots=True)
class Send:
    """Commands to send."""

    connection: Connection
    commands: Sequence[Command]


@dataclass(frozen=True, slots=True)
class Receive:
    """Replies to read. The result is as that of `SendAndReceive`."""

    connection: Connection
    num_replies: int


@dataclass(frozen=True, slots=True)
class Release:
    """A connection to return to its pool."""

    connection: Connection
    is_broken: bool = False
    """Close it first; the pool reconnects it when it is next taken."""


Transfer: TypeAlias = Connect | SendAndReceive | Send | Receive | Release
"""What is done with a connection."""

Action: TypeAlias = Step | Transfer

Routine: TypeAlias = Generator[Action | RunAll, Any, Result]  # Any: each action has its own result
"""Yields actions, is sent the result of each, and returns a result."""
