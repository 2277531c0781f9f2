"""How a round trip is cut into the shards' parts, without a server: moves, absences, and what has no key."""

import pytest
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from producer.contract.cluster import Address, Each, SlotTable, Trip, block_s, is_cluster, read_url, slot_of, spread
from producer.contract.keys import QueueKeys

A, B = ("a", 1), ("b", 2)
ZERO, ONE = QueueKeys("q", 0), QueueKeys("q", 1)
SET_ZERO, SET_ONE = ("SET", ZERO.bell, "x"), ("EVALSHA", "f00", 1, ONE.bell, b"{q:0}:in an argument")


def table_of(zero: Address | None, one: Address | None) -> SlotTable:
    """A table in which these serve the slots of the two partitions."""
    slots = [(key_slot(ZERO.bell.encode()), zero), (key_slot(ONE.bell.encode()), one)]
    return SlotTable((slot, slot, address) for slot, address in slots if address is not None)


class TestGivenCommandsForTwoShards:
    def test_when_they_answer_then_replies_stand_in_the_order_of_the_commands(self) -> None:
        trip = Trip((SET_ONE, SET_ZERO, SET_ONE))

        parts = {part.address: part for part in trip.parts(table_of(A, B))}
        trip.heard(parts[B], ["one", "three"])
        trip.heard(parts[A], ["two"])

        assert trip.is_done
        assert trip.answer() == ["one", "two", "three"]

    def test_when_one_says_that_its_slot_has_moved_then_only_its_commands_go_again(self) -> None:
        trip = Trip((SET_ZERO, SET_ONE))
        parts = {part.address: part for part in trip.parts(table_of(A, B))}
        trip.heard(parts[A], ["kept"])
        trip.heard(parts[B], [MovedError("1 a:1")])

        [again] = trip.parts(table_of(A, A))
        trip.heard(again, ["arrived"])

        assert (again.address, again.commands) == (A, (SET_ONE,))
        assert trip.answer() == ["kept", "arrived"]

    def test_when_nobody_serves_one_of_them_then_only_its_reply_is_an_error(self) -> None:
        trip = Trip((SET_ZERO, SET_ONE))

        [part] = trip.parts(table_of(A, None))
        trip.heard(part, ["kept"])

        assert trip.is_done
        kept, lost = trip.answer()
        assert kept == "kept"
        assert isinstance(lost, ClusterDownError)

    def test_when_a_slot_is_on_its_way_then_the_whole_is_tried_again_later(self) -> None:
        trip = Trip((SET_ZERO,))
        [part] = trip.parts(table_of(A, B))

        with pytest.raises(RedisConnectionError):
            trip.heard(part, [AskError("1 b:2")])

    @pytest.mark.parametrize(
        ("replies", "joined"),
        [
            ((2, 1), 1),
            (([1, 1], [0, 2]), [0, 1]),
            ((b"one", b"two"), Each((b"one", b"two"))),
            ((b"same", b"same"), b"same"),
        ],
        ids=["WAIT", "WAITAOF", "INFO", "alike"],
    )
    def test_when_something_has_no_key_then_every_shard_is_asked_and_the_least_counts_or_each(
        self, replies: tuple[object, object], joined: object
    ) -> None:
        trip = Trip((SET_ZERO, SET_ONE, ("WAIT", 1, 100)))

        for part, reply in zip(trip.parts(table_of(A, B)), replies, strict=True):
            trip.heard(part, ["written", reply])

        assert trip.answer() == ["written", "written", joined]

    def test_when_one_shard_refuses_what_has_no_key_then_that_is_the_answer(self) -> None:
        trip = Trip((SET_ZERO, SET_ONE, ("WAITAOF", 1, 0, 100)))
        first, second = trip.parts(table_of(A, B))
        trip.heard(first, ["written", [1, 0]])
        trip.heard(second, ["written", ResponseError("no file")])

        assert isinstance(trip.answer()[2], ResponseError)


class TestGivenCommandsOfMany:
    def test_when_nothing_has_a_key_then_one_shard_answers(self) -> None:
        trip = Trip((("PING",),))

        [part] = trip.parts(table_of(A, B))
        trip.heard(part, ["PONG"])

        assert trip.answer() == ["PONG"]

    def test_when_channels_of_several_slots_are_read_then_each_slot_has_a_read_that_does_not_block(self) -> None:
        names = (ZERO.key("channel", "t", "a", 0), ONE.key("channel", "t", "b", 0), ZERO.key("channel", "t", "c", 0))
        command = ("XREAD", "COUNT", 9, "BLOCK", 2000, "STREAMS", *names, "1-0", "2-0", "3-0")

        assert spread(command) == [
            ("XREAD", "COUNT", 9, "STREAMS", names[0], names[2], "1-0", "3-0"),
            ("XREAD", "COUNT", 9, "STREAMS", names[1], "2-0"),
        ]
        assert block_s(command) == 2.0

    def test_when_they_share_a_slot_then_the_read_stays_as_it_is(self) -> None:
        command = ("XREAD", "COUNT", 9, "BLOCK", 2000, "STREAMS", ZERO.bell, ZERO.outbox, "1-0", "2-0")

        assert spread(command) == [command]
        assert slot_of(command) == key_slot(ZERO.bell.encode())


class TestGivenUrls:
    def test_when_one_names_nodes_then_each_node_has_a_plain_url(self) -> None:
        url = read_url("rediss+cluster://me:s%40crt@one:7000,[::1]:7001,three?ssl_ca_certs=ca.pem")

        assert is_cluster("rediss+cluster://one:7000")
        assert url.seeds == (("one", 7000), ("::1", 7001), ("three", 6379))
        assert url.url_of(("::1", 7001)) == "rediss://me:s%40crt@[::1]:7001/0?ssl_ca_certs=ca.pem"

    @pytest.mark.parametrize("url", ["redis+cluster://", "redis+cluster://one:port", "redis+cluster://one:1/3"])
    def test_when_one_cannot_be_of_a_cluster_then_it_is_refused(self, url: str) -> None:
        with pytest.raises(ValueError, match=r"HOST:PORT|invalid literal|database"):
            read_url(url)
