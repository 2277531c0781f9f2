"""How a round trip is split by shard, without a server: slot moves, unavailable shards, commands without a key."""

from collections.abc import Sequence

import pytest
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.blocking import Cluster, Server
from sluice.protocol.redis.execution import Command, Reply
from sluice.protocol.redis.routing import (
    MAX_MOVES,
    NotACluster,
    ShardedRoundTrip,
    ShardReplies,
    SlotTable,
    block_s,
    slot_of,
    split_read,
)
from sluice.protocol.redis.urls import Address, is_cluster, read_cluster_url

A, B, C = ("a", 1), ("b", 2), ("c", 3)
ZERO, ONE = QueueKeys("q", 0), QueueKeys("q", 1)
SET_ZERO, SET_ONE = ("SET", ZERO.notifications, "x"), ("EVALSHA", "f00", 1, ONE.notifications, b"{q:0}:in an argument")


def table_of(zero: Address | None, one: Address | None) -> SlotTable:
    """A table in which these serve the slots of the two partitions."""
    slots = [(key_slot(ZERO.notifications.encode()), zero), (key_slot(ONE.notifications.encode()), one)]
    return SlotTable((slot, slot, address) for slot, address in slots if address is not None)


class TestGivenCommandsForTwoShards:
    def test_when_they_answer_then_replies_stand_in_the_order_of_the_commands(self) -> None:
        trip = ShardedRoundTrip((SET_ONE, SET_ZERO, SET_ONE))

        requests = {request.address: request for request in trip.requests(table_of(A, B))}
        trip.receive(requests[B], ["one", "three"])
        trip.receive(requests[A], ["two"])

        assert trip.is_done
        assert trip.replies() == ["one", "two", "three"]

    def test_when_one_says_that_its_slot_has_moved_then_only_its_commands_go_again(self) -> None:
        trip = ShardedRoundTrip((SET_ZERO, SET_ONE))
        requests = {request.address: request for request in trip.requests(table_of(A, B))}
        trip.receive(requests[A], ["kept"])
        trip.receive(requests[B], [MovedError("1 a:1")])

        [again] = trip.requests(table_of(A, A))
        trip.receive(again, ["arrived"])

        assert (again.address, again.commands) == (A, (SET_ONE,))
        assert trip.replies() == ["kept", "arrived"]

    def test_when_no_shard_serves_one_of_them_then_only_its_reply_is_an_error(self) -> None:
        trip = ShardedRoundTrip((SET_ZERO, SET_ONE))

        [request] = trip.requests(table_of(A, None))
        trip.receive(request, ["kept"])

        assert trip.is_done
        kept, lost = trip.replies()
        assert kept == "kept"
        assert isinstance(lost, ClusterDownError)

    def test_when_a_slot_is_on_its_way_then_the_whole_is_tried_again_later(self) -> None:
        trip = ShardedRoundTrip((SET_ZERO,))
        [request] = trip.requests(table_of(A, B))

        with pytest.raises(RedisConnectionError):
            trip.receive(request, [AskError("1 b:2")])

    @pytest.mark.parametrize(
        ("replies", "joined"),
        [
            ((2, 1), 1),
            (([1, 1], [0, 2]), [0, 1]),
            ((b"one", b"two"), ShardReplies((b"one", b"two"))),
            ((b"same", b"same"), b"same"),
        ],
        ids=["WAIT", "WAITAOF", "INFO", "alike"],
    )
    def test_when_a_command_has_no_key_then_every_shard_is_asked(
        self, replies: tuple[object, object], joined: object
    ) -> None:
        trip = ShardedRoundTrip((SET_ZERO, SET_ONE, ("WAIT", 1, 100)))

        for request, reply in zip(trip.requests(table_of(A, B)), replies, strict=True):
            trip.receive(request, ["written", reply])

        assert trip.replies() == ["written", "written", joined]

    def test_when_one_shard_refuses_what_has_no_key_then_that_is_the_answer(self) -> None:
        trip = ShardedRoundTrip((SET_ZERO, SET_ONE, ("WAITAOF", 1, 0, 100)))
        first, second = trip.requests(table_of(A, B))
        trip.receive(first, ["written", [1, 0]])
        trip.receive(second, ["written", ResponseError("no file")])

        assert isinstance(trip.replies()[2], ResponseError)


class TestGivenCommandsOfMany:
    def test_when_nothing_has_a_key_then_one_shard_answers(self) -> None:
        trip = ShardedRoundTrip((("PING",),))

        [request] = trip.requests(table_of(A, B))
        trip.receive(request, ["PONG"])

        assert trip.replies() == ["PONG"]

    def test_when_channels_of_several_slots_are_read_then_no_slot_blocks_another(self) -> None:
        names = (ZERO.key("channel", "t", "a", 0), ONE.key("channel", "t", "b", 0), ZERO.key("channel", "t", "c", 0))
        command = ("XREAD", "COUNT", 9, "BLOCK", 2000, "STREAMS", *names, "1-0", "2-0", "3-0")

        assert split_read(command) == [
            ("XREAD", "COUNT", 9, "STREAMS", names[0], names[2], "1-0", "3-0"),
            ("XREAD", "COUNT", 9, "STREAMS", names[1], "2-0"),
        ]
        assert block_s(command) == 2.0

    def test_when_they_share_a_slot_then_the_read_stays_as_it_is(self) -> None:
        command = ("XREAD", "COUNT", 9, "BLOCK", 2000, "STREAMS", ZERO.notifications, ZERO.outbox, "1-0", "2-0")

        assert split_read(command) == [command]
        assert slot_of(command) == key_slot(ZERO.notifications.encode())


MOVED = MovedError("1 b:2")
GONE = RedisConnectionError("gone")
MAP_A, MAP_B, MAP_C = ([[0, 16383, [address[0].encode(), address[1]]]] for address in (A, B, C))


class Nodes:
    """The nodes of a Cluster: they return replies and raise errors, one for each request. Keeps the addresses asked."""

    def __init__(self, seeds: str = "a:1") -> None:
        self._outcomes: list[object] = []
        self._asked: list[Address] = []
        self.cluster = Cluster(read_cluster_url(f"redis+cluster://{seeds}"), lambda url: Node(url, self))

    def outcome(self, node: Address) -> Reply:
        self._asked.append(node)
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception) and not isinstance(outcome, ResponseError):
            raise outcome
        return outcome

    def exchange(self, *outcomes: object) -> tuple[list[Reply], list[Address]]:
        """Make a round trip of one command; also return the addresses asked."""
        self._asked, self._outcomes = [], list(outcomes)
        return self.cluster.exchange((SET_ZERO,)), self._asked

    def find_shards(self, *outcomes: object) -> list[Address]:
        """Find the shards; return the addresses asked."""
        self._asked, self._outcomes = [], list(outcomes)
        self.cluster.shards()
        return self._asked


class Node(Server):
    """One of them."""

    def __init__(self, url: str, nodes: Nodes) -> None:
        host, port = url.removeprefix("redis://").removesuffix("/0").split(":")
        self.address, self._nodes = (host, int(port)), nodes

    def exchange(self, commands: Sequence[Command], *, is_repeatable: bool = False) -> list[Reply]:
        return [self._nodes.outcome(self.address)]


class TestGivenACluster:
    def test_when_a_slot_has_moved_then_its_command_goes_to_the_new_shard(self) -> None:
        replies, asked = Nodes().exchange(MAP_A, MOVED, MAP_B, "arrived")

        assert replies == ["arrived"]
        assert asked == [A, A, A, B]

    def test_when_slots_keep_moving_then_it_gives_up(self) -> None:
        with pytest.raises(RedisConnectionError, match=f"slots moved {MAX_MOVES} times"):
            Nodes().exchange(*[MAP_A, MOVED] * MAX_MOVES)

    @pytest.mark.parametrize(
        "problem",
        [GONE, InvalidResponse("HTTP"), ResponseError("BUSY a script runs"), NoPermissionError("no right")],
        ids=["gone", "not-redis", "busy", "denied"],
    )
    def test_when_a_node_gives_no_map_then_the_next_is_asked(self, problem: Exception) -> None:
        assert Nodes("a:1,b:2").find_shards(problem, MAP_B) == [A, B]

    @pytest.mark.parametrize("error", [GONE, RedisTimeoutError("late"), OSError("reset")], ids=["gone", "late", "os"])
    def test_when_a_shard_has_failed_then_the_others_are_asked_first(self, error: Exception) -> None:
        nodes = Nodes()
        nodes.find_shards([*MAP_A, [0, 1, [b"b", 2]]])

        with pytest.raises(type(error)):
            nodes.exchange(error)
        replies, asked = nodes.exchange(MAP_B, "arrived")

        assert (replies, asked) == (["arrived"], [B, B])

    def test_when_no_node_answers_then_the_last_error_is_raised(self) -> None:
        with pytest.raises(RedisConnectionError, match="gone"):
            Nodes("a:1,b:2").find_shards(GONE, GONE)

    def test_when_the_server_is_no_cluster_then_it_says_so(self) -> None:
        with pytest.raises(NotACluster, match="redis:// URL"):
            Nodes().find_shards(ResponseError("cluster support disabled"))

    def test_when_a_node_has_left_then_it_is_not_asked_again(self) -> None:
        nodes = Nodes()
        nodes.find_shards(MAP_B)
        with pytest.raises(RedisConnectionError, match="gone"):
            nodes.exchange(GONE)
        nodes.find_shards(MAP_C)
        nodes.cluster.forget()

        assert nodes.find_shards(GONE, MAP_C) == [C, A]

    def test_when_a_seed_has_failed_then_it_is_asked_last_until_it_answers(self) -> None:
        nodes = Nodes("a:1,b:2")
        nodes.find_shards(GONE, MAP_C)
        nodes.cluster.forget()

        asked = nodes.find_shards(GONE, GONE, MAP_A)
        nodes.cluster.forget()

        assert (asked, nodes.find_shards(MAP_A)) == ([C, B, A], [A])

    def test_when_another_thread_forgets_the_map_then_the_round_trip_keeps_what_it_read(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nodes, tables = Nodes(), [table_of(A, A)]
        table = property(lambda _: tables.pop() if tables else None, lambda _, __: None)
        monkeypatch.setattr(Cluster, "_table", table, raising=False)

        assert nodes.exchange("arrived") == (["arrived"], [A])


class TestGivenUrls:
    def test_when_one_names_nodes_then_each_node_has_a_plain_url(self) -> None:
        url = read_cluster_url("rediss+cluster://me:s%40crt@one:7000,[::1]:7001,three?ssl_ca_certs=ca.pem")

        assert is_cluster("rediss+cluster://one:7000")
        assert url.seeds == (("one", 7000), ("::1", 7001), ("three", 6379))
        assert url.url_of(("::1", 7001)) == "rediss://me:s%40crt@[::1]:7001/0?ssl_ca_certs=ca.pem"

    @pytest.mark.parametrize("url", ["redis+cluster://", "redis+cluster://one:port", "redis+cluster://one:1/3"])
    def test_when_one_cannot_be_of_a_cluster_then_it_is_refused(self, url: str) -> None:
        with pytest.raises(ValueError, match=r"HOST:PORT|invalid literal|database"):
            read_cluster_url(url)
