"""Run a Call on a connection: EVALSHA, and EVAL once where the server does not know the script. Never retries by itself."""

from collections.abc import Sequence
from typing import Any, TypeVar

from producer.contract.calls import Call

Reply = TypeVar("Reply")


def run(client: Any, call: Call[Reply]) -> Reply:  # Any: redis-py's clients share no typed base
    """Run one call."""
    raise NotImplementedError


def run_many(client: Any, calls: Sequence[Call[Any]]) -> list[Any]:  # Any: replies of different calls
    """Run several calls in one pipelined round trip; an error reply is returned in its place, not raised."""
    raise NotImplementedError


async def run_async(client: Any, call: Call[Reply]) -> Reply:  # Any: as above
    """Run one call on an asyncio client."""
    raise NotImplementedError


async def run_many_async(client: Any, calls: Sequence[Call[Any]]) -> list[Any]:  # Any: as above
    """Run several calls in one pipelined round trip on an asyncio client."""
    raise NotImplementedError
