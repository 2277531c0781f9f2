"""The driver of a Cluster's router, without a server: which errors mean that a shard is unavailable."""

from collections.abc import Generator
from typing import Any

import pytest
from redis.crc import key_slot
from redis.exceptions import ClusterDownError, DataError, InvalidResponse, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.cluster import ClusterDriver
from sluice.protocol.redis.drivers import drive
from sluice.protocol.redis.execution import Command, Reply
from sluice.protocol.redis.routing import Routing
from sluice.protocol.redis.slot_table import CLUSTER_SLOTS
from sluice.protocol.redis.urls import read_cluster_url

KEYS = [QueueKeys("q", 0).notifications, QueueKeys("q", 1).notifications]
COMMANDS = [("EXISTS", key) for key in KEYS]
SLOT_OF_A = key_slot(KEYS[0].encode())
SLOTS = [[SLOT_OF_A, SLOT_OF_A, [b"a", 1]], [0, SLOT_OF_A - 1, [b"b", 2]], [SLOT_OF_A + 1, 16383, [b"b", 2]]]
NODE_A, NODE_B = "redis://a:1/0", "redis://b:2/0"

UNAVAILABLE = {
    "gone": RedisConnectionError("gone"),
    "late": RedisTimeoutError("late"),
    "os": OSError("Too many open files"),
    "not-redis": InvalidResponse("HTTP"),
    "protected": ResponseError("DENIED Redis is running in protected mode"),
    "denied": NoPermissionError("no right to CLIENT"),
}


class Shards:
    """Two shards, of which the first fails. Keeps who was asked for what."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.asked: list[tuple[str, str]] = []
        self.driver = ClusterDriver(read_cluster_url("redis+cluster://b:2,a:1"), str)

    def run(self, routing: Routing[Any]) -> Any:  # Any: a routing's result
        return drive(self.driver.run(routing, self._exchange), lambda reply: reply)

    def _exchange(self, node: str, commands: tuple[Command, ...]) -> Generator[list[Reply], list[Reply], list[Reply]]:
        self.asked.append((node, str(commands[0][0])))
        if commands == (CLUSTER_SLOTS,):
            return (yield [SLOTS])
        if node == NODE_A:
            raise self._error
        return (yield [node] * len(commands))


class TestGivenAShardWithoutReplies:
    @pytest.mark.parametrize("error", UNAVAILABLE.values(), ids=UNAVAILABLE)
    def test_when_a_part_is_enough_then_the_other_shard_has_its_reply(self, error: Exception) -> None:
        shards = Shards(error)

        lost, kept = shards.run(shards.driver.router.round_trip(COMMANDS, is_partial=True))

        assert isinstance(lost, ClusterDownError)
        assert f"the shard at a:1 does not answer: {error}" in str(lost)
        assert kept == NODE_B

    @pytest.mark.parametrize("error", UNAVAILABLE.values(), ids=UNAVAILABLE)
    def test_when_all_is_wanted_then_its_error_is_raised_and_the_map_read_again(self, error: Exception) -> None:
        shards = Shards(error)
        routings = [shards.driver.router.round_trip(COMMANDS), shards.driver.router.single(COMMANDS[0])]

        for routing in routings:
            with pytest.raises(type(error)):
                shards.run(routing)

        assert [node for node, name in shards.asked if name == "CLUSTER"] == [NODE_B, NODE_B]
        assert (NODE_B, "EXISTS") in shards.asked


class TestGivenACommandThatCannotBeSent:
    """It is the caller's mistake, not an outage."""

    def test_when_it_is_sent_then_its_error_is_raised(self) -> None:
        shards = Shards(DataError("an argument of type dict"))

        with pytest.raises(DataError):
            shards.run(shards.driver.router.round_trip(COMMANDS, is_partial=True))
