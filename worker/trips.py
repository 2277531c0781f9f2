"""Pipelined round trips to Redis: what travels, what each reply means, and who does not answer. Knows no jobs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from producer.contract.calls import Call
from producer.contract.keys import QueueKeys
from producer.contract.running import run_many
from worker.clock import monotonic_s
from worker.common import Common
from worker.connections import Client


@dataclass(frozen=True, slots=True)
class Leg:
    """One call of a round trip, and what its reply means."""

    keys: QueueKeys
    call: Call[Any]  # replies of different calls travel together
    read: Callable[[Any], None]
    missed: Callable[[], None] = lambda: None
    """Its reply is an error."""


@dataclass(frozen=True, slots=True)
class Trip:
    """What became of a round trip."""

    has_answer: bool
    """Somebody answered."""

    is_whole: bool
    """Everybody did."""


class Trips:
    """One thread's way to Redis: one round trip at a time, over a client of its own."""

    def __init__(self, client: Client, common: Common) -> None:
        self._client = client
        self._common = common

    def make(self, legs: Sequence[Leg]) -> Trip:
        """Send, and let each reply be heard. Whoever did not answer is left out of the next ones."""
        beat_every_s, sent_s = self._common.config.beat.every_s, monotonic_s()
        replies = self._send(legs)
        if monotonic_s() - sent_s > beat_every_s:
            self._common.health.stalled()
        problems = _read_all(legs, replies)
        for keys, problem in problems.items():
            self._common.absences.failed(keys, problem)
        answered = {leg.keys for leg in legs} - problems.keys()
        for keys in answered:
            self._common.absences.answered(keys)
        if answered:
            self._common.meters.made_round_trip()
        return Trip(bool(answered), not problems)

    def _send(self, legs: Sequence[Leg]) -> list[Any]:  # as in `Leg`
        """The reply to each; where nothing came back, the error is every reply."""
        try:
            return run_many(self._client, [leg.call for leg in legs])
        except (RedisError, OSError) as error:
            return [error] * len(legs)


def _read_all(legs: Sequence[Leg], replies: Sequence[Any]) -> dict[QueueKeys, RedisError | OSError]:  # as in `Leg`
    """Let each reply be heard; the first error of each partition that had one."""
    problems: dict[QueueKeys, RedisError | OSError] = {}
    for leg, reply in zip(legs, replies, strict=True):
        if isinstance(reply, (RedisError, OSError)):
            problems.setdefault(leg.keys, reply)
            leg.missed()
        elif isinstance(reply, BaseException):
            raise reply
        else:
            leg.read(reply)
    return problems
