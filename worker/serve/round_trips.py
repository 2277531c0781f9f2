"""Pipelined round trips to Redis, and which partitions did not answer. Knows no jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from sluice.protocol.calls import Call
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run_commands, run_many
from sluice.worker.clock import monotonic_s
from sluice.worker.connection.clients import Client
from sluice.worker.serve.context import WorkerContext

PartitionCall = tuple[QueueKeys, Call[Any]]  # Any: replies of different calls travel together
"""A call with the partition that it goes to."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """The outcome of one round trip."""

    replies: list[Any]  # as in `PartitionCall`
    """One for each call, in order; the error for a call that was not answered or whose reply cannot be parsed."""

    answered: frozenset[QueueKeys]
    """The partitions that answered all of their calls."""

    problems: Mapping[QueueKeys, Exception]
    """The first error of each other partition."""

    @property
    def has_answer(self) -> bool:
        """Whether at least one partition answered all of its calls."""
        return bool(self.answered)

    @property
    def is_complete(self) -> bool:
        """Whether every call was answered."""
        return not self.problems


class RoundTrips:
    """One thread's connection to Redis: one round trip at a time."""

    def __init__(self, client: Client, context: WorkerContext) -> None:
        """Use `client`, which belongs to the calling thread alone."""
        self._client = client
        self._context = context

    def make(self, calls: Sequence[PartitionCall]) -> RoundTrip:
        """Send the calls together. Apply the replies, then call `mark_partitions`."""
        beat_every_s, sent_s = self._context.config.beat.every_s, monotonic_s()
        replies = self._send(calls)
        if monotonic_s() - sent_s > beat_every_s:
            self._context.health.stalled()
        problems = _first_problems(calls, replies)
        answered = frozenset(keys for keys, _ in calls) - problems.keys()
        return RoundTrip(replies, answered, problems)

    def mark_partitions(self, round_trip: RoundTrip) -> None:
        """Mark the partitions that did not answer as unavailable, and forget the failures of the others.

        Raises:
            Exception: A reply that cannot be parsed.
            RedisError: A partition has refused too many calls in a row.
        """
        for keys, problem in round_trip.problems.items():
            if not isinstance(problem, (RedisError, OSError)):
                raise problem
            self._context.unavailable.failed(keys, problem)
        for keys in round_trip.answered:
            self._context.unavailable.answered(keys)
        if round_trip.has_answer:
            self._context.meters.made_round_trip()

    def exists(self, keys: Sequence[str]) -> bool:
        """Return whether any of these keys of one partition exists.

        Raises:
            RedisError, OSError: the server does not answer, or refuses.
        """
        [reply] = run_commands(self._client, [("EXISTS", *keys)])
        if isinstance(reply, Exception):
            raise reply
        return bool(reply)

    def _send(self, calls: Sequence[PartitionCall]) -> list[Any]:  # as in `PartitionCall`
        try:
            return run_many(self._client, [call for _, call in calls])
        except (RedisError, OSError) as error:
            return [error] * len(calls)


def _first_problems(
    calls: Sequence[PartitionCall],
    replies: Sequence[Any],  # as in `PartitionCall`
) -> dict[QueueKeys, Exception]:
    """Return the first error of each partition that has one."""
    problems: dict[QueueKeys, Exception] = {}
    for (keys, _), reply in zip(calls, replies, strict=True):
        if isinstance(reply, Exception):
            problems.setdefault(keys, reply)
    return problems
