"""A queue's number of partitions: read from the server, compared with the user's, and cached."""

import pytest

from sluice.producer.errors import AccessDenied, InvalidSetting, QueueUnreachable
from sluice.producer.operations import queue as module
from sluice.producer.operations.operation import Ask, Operation, Reply, Result
from sluice.producer.operations.queue import Queue


def answered(operation: Operation[Result], *replies: list[Reply] | Exception) -> tuple[Result, list[Ask]]:
    """Run an operation with these replies to its round trips; return its result and the round trips."""
    asks: list[Ask] = []
    left = list(replies)
    try:
        step = next(operation)
        while True:
            assert isinstance(step, Ask)
            asks.append(step)
            reply = left.pop(0)
            step = operation.throw(reply) if isinstance(reply, Exception) else operation.send(reply)
    except StopIteration as stop:
        assert not left
        return stop.value, asks


def num_keys(queue: Queue, *replies: list[Reply] | Exception) -> int:
    keys, _ = answered(queue.all_keys(), *replies)
    return len(keys)


class TestGivenAQueueOfAnUnknownNumberOfPartitions:
    def test_when_the_workers_have_stated_one_then_all_its_keys_are_used(self) -> None:
        keys, [ask] = answered(Queue("q").all_keys(), [None, b"4"])

        assert [one.prefix for one in keys] == ["{q:0}:2", "{q:1}:2", "{q:2}:2", "{q:3}:2"]
        assert ask.commands[:2] == (("HGET", "{q:0}:2:config", "durability"), ("HGET", "{q:0}:2:config", "partitions"))

    def test_when_it_is_read_twice_then_the_server_is_asked_once(self) -> None:
        queue = Queue("q")

        assert [num_keys(queue, [None, b"4"]), num_keys(queue)] == [4, 4]

    def test_when_no_worker_has_stated_one_then_it_is_one_until_a_worker_does(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "KEPT_S", -1)
        queue = Queue("q")

        assert [num_keys(queue, [None, None]), num_keys(queue, [None, b"4"])] == [1, 4]

    def test_when_the_server_loses_its_settings_then_the_number_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "KEPT_S", -1)
        queue = Queue("q")

        assert [num_keys(queue, [None, b"4"]), num_keys(queue, [None, None])] == [4, 4]

    @pytest.mark.parametrize("stated", [b"", b"-1", b"0", b"four", 3])
    def test_when_the_setting_is_no_number_then_it_is_one(self, stated: Reply) -> None:
        assert num_keys(Queue("q"), [None, stated]) == 1


class TestGivenAQueueWhoseNumberTheUserNamed:
    def test_when_the_workers_serve_another_then_it_is_refused_each_time(self) -> None:
        queue = Queue("q", 2)

        for _ in range(2):
            with pytest.raises(InvalidSetting, match=r"serve 4 .* made for 2: leave out `partitions` .*, or give 4"):
                num_keys(queue, [None, b"4"])

    def test_when_no_worker_has_stated_one_then_it_holds(self) -> None:
        assert num_keys(Queue("q", 2), [None, None]) == 2

    def test_when_partition_0_is_away_then_the_one_of_the_job_is_asked(self) -> None:
        durability, asks = answered(Queue("q", 2).read(1), QueueUnreachable("away"), [b"aof", b"2"])

        assert durability == b"aof"
        assert [ask.commands[0][1] for ask in asks] == ["{q:0}:2:config", "{q:1}:2:config"]


class TestGivenJobsOfAnEarlierVersion:
    def test_when_settings_are_read_again_then_it_is_said_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(module, "KEPT_S", -1)
        queue = Queue("q")

        for _ in range(2):
            num_keys(queue, [None, b"1", [b"3", b"1", b"9"]])

        assert [record.getMessage() for record in caplog.records] == [
            "queue 'q' has jobs in the format of an earlier version, 3 waiting and 1 running: "
            "run `worker migrate-queue --queue q`"
        ]

    @pytest.mark.parametrize("reply", [[None, None, None], [b"x", b"-1", b"nan"], AccessDenied("no")])
    def test_when_there_are_none_or_this_user_may_not_look_then_nothing_is_said(
        self, reply: Reply, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert num_keys(Queue("q"), [None, b"1", reply]) == 1
        assert caplog.records == []

    def test_when_the_settings_cannot_be_read_then_that_is_the_error(self) -> None:
        with pytest.raises(AccessDenied):
            num_keys(Queue("q"), [AccessDenied("no"), b"1", None])
