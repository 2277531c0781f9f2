"""Run calls as EVALSHA, and as EVAL if the server does not have the script. No retries.

The client must not retry either (`no_retry()`), because only the caller knows whether a script may run twice. It must
not decode replies, which contain bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError
from redis.retry import Retry

from sluice.protocol.calls import Argument, Call
from sluice.protocol.scripts import load, source_of

Result = TypeVar("Result")
AnyCall = Call[Any]  # Any: calls of different replies travel together

Command: TypeAlias = tuple[Argument, ...]
"""A command's name and its arguments."""

Reply: TypeAlias = object
"""The reply to one command; an error reply is an exception."""


class Pipeline(Protocol):
    """The methods of a redis-py pipeline that are used here."""

    def execute_command(self, *args: object) -> object: ...
    def execute(self, raise_on_error: bool = True) -> list[object]: ...


class Client(Protocol):
    """The methods of a redis-py client that are used here; its clients share no typed base."""

    def execute_command(self, *args: object) -> object: ...
    def pipeline(self, transaction: bool = True) -> Pipeline: ...


class RoundTripper(ABC):
    """A client with its own method for a round trip, unlike a plain client of redis-py."""

    @abstractmethod
    def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Make one round trip; an error reply is returned in its place, not raised."""

    def run(self, commands: Sequence[Command]) -> list[Reply]:
        """As `exchange`; for an unreachable shard of a Cluster, the reply is an error, too."""
        return self.exchange(commands)


def no_retry() -> Retry:
    """Return the `retry=` of a client that does not retry commands, as redis-py does by default."""
    return Retry(NoBackoff(), 0)


# ---------------------------------------------------------------- commands


def command_of(call: AnyCall) -> Command:
    """Return the call as EVALSHA."""
    return ("EVALSHA", load(call.script).sha1, len(call.keys), *call.keys, *call.args)


def with_source(command: Command) -> Command:
    """Return an EVALSHA of `command_of` as EVAL; any other command unchanged."""
    if command[0] != "EVALSHA":
        return command
    return ("EVAL", source_of(str(command[1])), *command[2:])


def unknown_scripts(replies: Sequence[Reply]) -> list[int]:
    """Return the positions of calls whose script the server does not have."""
    return [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]


# ---------------------------------------------------------------- on a redis-py client


def run(client: Client | RoundTripper, call: Call[Result]) -> Result:
    """Run one call.

    Raises:
        redis.exceptions.RedisError: from the server or the connection.
    """
    commands = [command_of(call)]
    [reply] = client.exchange(commands) if isinstance(client, RoundTripper) else run_commands(client, commands)
    if isinstance(reply, Exception):
        raise reply
    return call.parse(reply)


def run_many(client: Client | RoundTripper, calls: Sequence[AnyCall]) -> list[Any]:  # Any: replies of different calls
    """Run several calls in one pipelined round trip; an error reply is returned in its place, not raised.

    Raises:
        redis.exceptions.RedisError: from the connection.
    """
    replies = run_commands(client, [command_of(call) for call in calls])
    return [
        reply if isinstance(reply, Exception) else cast("object", call.parse(reply))
        for call, reply in zip(calls, replies, strict=True)
    ]


def run_commands(client: Client | RoundTripper, commands: Sequence[Command]) -> list[Reply]:
    """Run commands in one pipelined round trip; an error reply is returned in its place, not raised.

    Raises:
        redis.exceptions.RedisError: from the connection.
    """
    if isinstance(client, RoundTripper):
        return client.run(commands)
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies = pipeline.execute(raise_on_error=False)
    if unknown := unknown_scripts(replies):
        again = run_commands(client, [with_source(commands[place]) for place in unknown])
        for place, reply in zip(unknown, again, strict=True):
            replies[place] = reply
    return replies
