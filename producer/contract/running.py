"""Run a Call on a connection: EVALSHA, and EVAL where the server does not know the script. Never retries by itself.

The client must not retry by itself either (`no_retry()`), and must not decode replies: a repeated script is safe only
where its caller says so, and replies carry bytes.
"""

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar, cast

from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError
from redis.retry import Retry

from producer.contract.calls import Call
from producer.contract.scripts import load

Reply = TypeVar("Reply")
AnyCall = Call[Any]  # Any: calls of different replies travel together


class Pipeline(Protocol):
    """What is used of a redis-py pipeline."""

    def execute_command(self, *args: object) -> object: ...
    def execute(self, raise_on_error: bool = True) -> list[object]: ...


class Client(Protocol):
    """What is used of a redis-py client; all of its clients have it, but share no typed base."""

    def execute_command(self, *args: object) -> object: ...
    def pipeline(self, transaction: bool = True) -> Pipeline: ...


class AsyncPipeline(Protocol):
    """What is used of a redis-py asyncio pipeline."""

    def execute_command(self, *args: object) -> object: ...
    def execute(self, raise_on_error: bool = True) -> Awaitable[list[object]]: ...


class AsyncClient(Protocol):
    """What is used of a redis-py asyncio client."""

    def execute_command(self, *args: object) -> Awaitable[object]: ...
    def pipeline(self, transaction: bool = True) -> AsyncPipeline: ...


def no_retry() -> Retry:
    """For a client's `retry=`: redis-py repeats commands by default, and a script must never be repeated unasked."""
    return Retry(NoBackoff(), 0)


def run(client: Client, call: Call[Reply]) -> Reply:
    """Run one call.

    Raises:
        redis.exceptions.RedisError: as the server or the connection says.
    """
    try:
        reply = client.execute_command(*_evalsha(call))
    except NoScriptError:
        reply = client.execute_command(*_eval(call))
    return call.parse(reply)


def run_many(client: Client, calls: Sequence[AnyCall]) -> list[Any]:  # Any: replies of different calls
    """Run several calls in one pipelined round trip; an error reply is returned in its place, not raised."""
    replies = _execute(client, [_evalsha(call) for call in calls])
    unknown = _without_script(replies)
    if unknown:
        again = _execute(client, [_eval(calls[i]) for i in unknown])
        replies = _merged(replies, unknown, again)
    return _parsed(calls, replies)


async def run_async(client: AsyncClient, call: Call[Reply]) -> Reply:
    """Run one call on an asyncio client.

    Raises:
        redis.exceptions.RedisError: as the server or the connection says.
    """
    try:
        reply = await client.execute_command(*_evalsha(call))
    except NoScriptError:
        reply = await client.execute_command(*_eval(call))
    return call.parse(reply)


async def run_many_async(client: AsyncClient, calls: Sequence[AnyCall]) -> list[Any]:  # Any: as above
    """Run several calls in one pipelined round trip on an asyncio client; errors are returned, not raised."""
    replies = await _execute_async(client, [_evalsha(call) for call in calls])
    unknown = _without_script(replies)
    if unknown:
        again = await _execute_async(client, [_eval(calls[i]) for i in unknown])
        replies = _merged(replies, unknown, again)
    return _parsed(calls, replies)


FIRST_DELAY_S = 0.02
MAX_DELAY_S = 1.0


def longer_delay_s(delay_s: float) -> float:
    """How long to wait before the next try of a call that may be repeated, after having waited this long (0: never)."""
    return min(max(delay_s * 2, FIRST_DELAY_S), MAX_DELAY_S)


Command = tuple[object, ...]


def _evalsha(call: AnyCall) -> Command:
    return ("EVALSHA", load(call.script).sha1, len(call.keys), *call.keys, *call.args)


def _eval(call: AnyCall) -> Command:
    return ("EVAL", load(call.script).source, len(call.keys), *call.keys, *call.args)


def _execute(client: Client, commands: Sequence[Command]) -> list[object]:
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    return pipeline.execute(raise_on_error=False)


async def _execute_async(client: AsyncClient, commands: Sequence[Command]) -> list[object]:
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    return await pipeline.execute(raise_on_error=False)


def _without_script(replies: Sequence[object]) -> list[int]:
    return [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]


def _merged(replies: Sequence[object], places: Sequence[int], again: Sequence[object]) -> list[object]:
    later = dict(zip(places, again, strict=True))
    return [later.get(i, reply) for i, reply in enumerate(replies)]


def _parsed(calls: Sequence[AnyCall], replies: Sequence[object]) -> list[object]:
    return [
        reply if isinstance(reply, Exception) else cast("object", call.parse(reply))
        for call, reply in zip(calls, replies, strict=True)
    ]
