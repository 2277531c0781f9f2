"""A Cluster, without a server: which errors mean that a shard is unavailable."""

from collections.abc import Sequence

import pytest
from redis.crc import key_slot
from redis.exceptions import ClusterDownError, DataError, InvalidResponse, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.blocking import Cluster, Server
from sluice.protocol.redis.execution import Command, Reply
from sluice.protocol.redis.routing import CLUSTER_SLOTS
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


class Node(Server):
    """A shard, of which the first fails. Keeps who was asked for what."""

    def __init__(self, url: str, error: Exception, asked: list[tuple[str, str]]) -> None:
        self._name, self._error, self._asked = url, error, asked

    def exchange(self, commands: Sequence[Command], *, is_repeatable: bool = False) -> list[Reply]:
        self._asked.append((self._name, str(commands[0][0])))
        if commands[0] == CLUSTER_SLOTS:
            return [SLOTS]
        if self._name == NODE_A:
            raise self._error
        return [self._name] * len(commands)


def cluster_of(error: Exception, asked: list[tuple[str, str]]) -> Cluster:
    return Cluster(read_cluster_url("redis+cluster://b:2,a:1"), lambda url: Node(url, error, asked))


class TestGivenAShardWithoutReplies:
    @pytest.mark.parametrize("error", UNAVAILABLE.values(), ids=UNAVAILABLE)
    def test_when_a_part_is_enough_then_the_other_shard_has_its_reply(self, error: Exception) -> None:
        lost, kept = cluster_of(error, []).exchange(COMMANDS, is_partial=True)

        assert isinstance(lost, ClusterDownError)
        assert f"the shard at a:1 does not answer: {error}" in str(lost)
        assert kept == NODE_B

    @pytest.mark.parametrize("error", UNAVAILABLE.values(), ids=UNAVAILABLE)
    def test_when_all_is_wanted_then_its_error_is_raised_and_the_map_read_again(self, error: Exception) -> None:
        asked: list[tuple[str, str]] = []
        cluster = cluster_of(error, asked)

        for commands in (COMMANDS, COMMANDS[:1]):
            with pytest.raises(type(error)):
                cluster.exchange(commands)

        assert [node for node, name in asked if name == "CLUSTER"] == [NODE_B, NODE_B]
        assert (NODE_B, "EXISTS") in asked


class TestGivenACommandThatCannotBeSent:
    """It is the caller's mistake, not an outage."""

    def test_when_it_is_sent_then_its_error_is_raised(self) -> None:
        cluster = cluster_of(DataError("an argument of type dict"), [])

        with pytest.raises(DataError):
            cluster.exchange(COMMANDS, is_partial=True)
