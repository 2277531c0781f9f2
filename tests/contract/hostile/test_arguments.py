"""Settings and arguments are checked before a script's first write: a bad one changes nothing."""

from typing import Any

import pytest
import redis

from sluice.producer.contract import calls
from sluice.producer.contract.calls import Call, QueueSettings
from sluice.producer.contract.packing import pack_for_script
from sluice.producer.contract.states import JobState
from sluice.producer.contract.wire import JobId
from tests.contract.driving import Queue, check, ending

SETTINGS = [
    ("result_ttl_ms", "0"),
    ("result_ttl_ms", "1.5"),
    ("idempotency_ttl_ms", "0"),
    ("channel_ttl_ms", "-1"),
    ("max_waiting_jobs", "many"),
    ("max_outbox_entries", "nan"),
    ("bytes_per_token", "0"),
    ("age_step_ms", "inf"),
    ("mode", "1; x"),
    ("paused", "2"),
    ("unknown", "text"),
]
ROW = ["0.t.b", b"spec", b"payload", "1", 0, 10, 40, 20, 1, None, b"digest"]


def raw(queue: Queue, script: str, *arguments: Any) -> object:  # Any: what no client of ours sends
    return queue.run(Call(script, queue.keys.fixed(), arguments, lambda reply: reply))


def state_of(queue: Queue) -> dict[str, object]:
    return {name: queue.client.dump(queue.keys.key(name)) for name in queue.names()}


class TestGivenASettingOutOfItsRange:
    @pytest.mark.parametrize(("name", "value"), SETTINGS)
    def test_when_it_is_written_then_it_is_refused_with_all_beside_it(
        self, one_queue: Queue, name: str, value: str
    ) -> None:
        before = state_of(one_queue)

        with pytest.raises(redis.ResponseError, match=f"{name} must be"):
            raw(one_queue, "configure", "max_failures", "5", name, value)

        assert state_of(one_queue) == before

    @pytest.mark.parametrize("name", ["result_ttl_ms", "idempotency_ttl_ms", "channel_ttl_ms", "partitions"])
    def test_when_a_client_makes_it_then_it_says_what_is_wrong(self, name: str) -> None:
        values: dict[str, Any] = {name: 0}

        with pytest.raises(ValueError, match=f"{name} must be 1 or more"):
            QueueSettings(**values)

    @pytest.mark.parametrize("name", ["result_ttl_ms", "idempotency_ttl_ms", "channel_ttl_ms"])
    def test_when_an_older_release_wrote_it_then_jobs_end_all_the_same(self, queue: Queue, name: str) -> None:
        queue.client.hset(queue.keys.key("config"), name, "0")
        queue.add("one", idempotency_key="k")
        worker = queue.worker("A")

        assert worker.advance(ending(worker.take(), 0, 3)) == [calls.Ok(None)]

        assert queue.state(JobId("0.t.one")) is JobState.DONE
        check(queue)


class TestGivenArgumentsThatNoClientSends:
    @pytest.mark.parametrize(
        ("at", "value"),
        [(0, 5), (1, None), (2, [1]), (3, 7), (4, 10), (4, "x"), (7, -1), (7, "x"), (8, 0), (8, 65), (10, None)],
    )
    def test_when_a_submit_has_a_bad_row_then_none_of_it_is_written(
        self, one_queue: Queue, at: int, value: object
    ) -> None:
        bad = list[object](ROW)
        bad[at] = value
        before = state_of(one_queue)

        with pytest.raises(redis.ResponseError):
            raw(one_queue, "submit", pack_for_script([["0.t.a", *ROW[1:]], bad]))

        assert state_of(one_queue) == before

    @pytest.mark.parametrize(
        ("script", "arguments"),
        [
            ("cancel", ("", pack_for_script(["0.t.one", ["x"]]))),
            ("delete", (pack_for_script(["0.t.one", {"a": 1}]),)),
            ("requeue", (pack_for_script(["0.t.one", 5]),)),
            ("give_back", ("A", "1", pack_for_script([["0.t.one", "x"]]), "0")),
            ("advance", ("A", pack_for_script([["0.t.one", 1, "x", 0, 1, b"e"]]))),
            ("pull", ("B", "x", 1, 1, 1, 1, 1, 0, 0, 1, "")),
            ("beat", ("A", "1", "nan", pack_for_script([]))),
            ("expire_batch", ("b", "soon")),
            ("put_result", ("A", "0.t.one", "1", "x", b"part")),
        ],
    )
    def test_when_a_script_gets_them_then_it_writes_nothing(
        self, one_queue: Queue, script: str, arguments: tuple[Any, ...]
    ) -> None:
        one_queue.add("one")
        one_queue.worker("A").take()
        before = state_of(one_queue)

        with pytest.raises(redis.ResponseError):
            raw(one_queue, script, *arguments)

        assert state_of(one_queue) == before
