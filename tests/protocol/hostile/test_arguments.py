"""Settings and arguments are checked before a script's first write: a bad one changes nothing."""

import struct
from dataclasses import fields
from typing import Any, cast

import pytest
import redis

from sluice.protocol import calls, limits
from sluice.protocol.calls import Call, QueueSettings
from sluice.protocol.packing import pack_for_script
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, check, ending

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
    ("unknown", "1"),
    ("weight:", "1"),
    ("max_running:t", "-1"),
    ("max_running:t", "1.5"),
    ("max_running:t", "1e13"),
    ("max_running:T", "1"),
    ("tokens_per_minute:t", "0"),
    ("tokens_per_minute:t", "nan"),
    ("tokens_per_minute:", "1"),
    ("limited", "1"),
]
ROW = ["0.t.b", b"spec", b"payload", "1", 0, 10, 40, 20, 1, None, b"digest"]
INFINITE = float("inf")


def a_step(*, parts: int = 0, tokens: int = 0, start: int = 0, entry: bytes = b"", rest: bytes = b"") -> bytes:
    """Progress as a worker packs it, with what no worker sends."""
    name = b"0.t.one"
    return bytes((parts, len(name))) + name + struct.pack("<IBIII", 1, 0, start, tokens, len(entry)) + entry + rest


def an_end(state: bytes = b"d") -> bytes:
    """The end behind it."""
    return state + bytes(1 + 1 + 4 + 1 + 4 + 4 + 6 + 6 + 6 + 4)


def counted(**changes: Any) -> tuple[Any, ...]:  # Any: as above
    """Arguments of repair_counters, with some changed."""
    known = {"lanes": ["0:t"], "stamp": "1-0", "jobs": 1, "tokens": 30, "bytes": 40, "sums": [["0:t", "1 30", 30]]}
    lanes, stamp, *numbers, sums, tenants = (known | {"tenants": [["t", 1, 30, 40]]} | changes).values()
    return pack_for_script(lanes), 0, stamp, *numbers, pack_for_script(sums), pack_for_script(tenants)


BAD_ARGUMENTS: list[tuple[str, tuple[Any, ...]]] = [
    ("cancel", ("", pack_for_script(["0.t.one", ["x"]]))),
    ("cancel", ("",)),
    ("delete", (pack_for_script(["0.t.one", {"a": 1}]),)),
    ("requeue", (pack_for_script(["0.t.one", 5]),)),
    ("give_back", ("A", "1", pack_for_script([["0.t.one", "x"]]), "0")),
    ("give_back", ("", "1", pack_for_script([]), "0")),
    ("advance", ("A", b"x")),
    ("advance", ("A", a_step()[:-1])),
    ("advance", ("A", a_step() + b"x")),
    ("advance", ("A", a_step(parts=4))),
    ("advance", ("A", a_step(tokens=1))),
    ("advance", ("A", a_step(start=2**32 - 1, tokens=1, entry=b"e"))),
    ("advance", ("A", a_step(parts=1, rest=b"x"))),
    ("advance", ("A", a_step(parts=2, rest=an_end(b"q")))),
    ("advance", ("A", a_step(parts=2, rest=an_end()[:-1]))),
    ("advance", ("A", a_step(parts=2, rest=an_end(b"f"), tokens=1))),
    ("advance", ("A", a_step() * 257)),
    ("pull", ("B", "x", 1, 1, 1, 1, 1, 0, 0, 1, "")),
    ("pull", ("B", 1, 1, 1, 1, 1, 1, 0, 0, 1, "soon", "", 0)),
    ("pull", ("B", 1, 1, 1, 1, 1, 1, 0, 0, 1, "", "", "nan")),
    ("pull", ("", 1, 1, 1, 1, 1, 1, 0, 0, 1, "", "", 0)),
    ("pull", ("B", 1, 1, 1, 1, 1, 1, 0, 0, 1, "", "", 0, "x", "1-1")),
    ("pull", ("B", 1, 1, 1, 1, 1, 1, 0, 0, 1, "", "", 0, "1-1", "1-1;")),
    ("pull", ("B", 1, 1, 1, 1, 1, 1, 0, 0, 1, "", "", 0, "1-1")),
    ("beat", ("A", "1", "nan", pack_for_script([]))),
    ("beat", ("", "1", "4000", pack_for_script([]))),
    ("report_death", ()),
    ("report_death", ("",)),
    ("put_result", ("A", "0.t.one", "1", "x", b"part")),
    ("close_batch", ("b",)),
    ("close_batch", ("", "")),
    ("close_batch", ("b" * 65, "")),
    ("close_batch", ("b", "u" * 9000)),
    ("cancel_batch", ("b",)),
    ("cancel_batch", ("", "")),
    ("expire_batch", ("b", "soon")),
    ("expire_batch", ("", "1")),
    ("inspect_batch", ("",)),
    ("purge", ()),
    ("purge", ("a b",)),
    ("audit_jobs", (pack_for_script([5]),)),
    ("audit_jobs", (b"",)),
    ("audit_lane", ("0:t", "-", "x")),
    ("audit_lane", ("0:t", "x", "1")),
    ("audit_lane", ("0:t", "-", "257")),
    ("audit_counts", (pack_for_script([["x"]]),)),
    ("repair_jobs", (pack_for_script([5]),)),
    ("repair_lane", ("x", "t", pack_for_script(["1-0"]))),
    ("repair_lane", ("0", "a b", pack_for_script(["1-0"]))),
    ("repair_lane", ("0", "t", pack_for_script(["1-0", "x"]))),
    ("repair_counters", counted(lanes=[5])),
    ("repair_counters", counted(stamp="x" * 200)),
    ("repair_counters", counted(jobs="x")),
    ("repair_counters", counted(tokens="x")),
    ("repair_counters", counted(bytes="nan")),
    ("repair_counters", counted(sums=[["0:t", "1 30", -1]])),
    ("repair_counters", counted(sums=[["0:t", "1 30", 0.5]])),
    ("repair_counters", counted(tenants=[["t", 1, -30, 40]])),
    ("repair_counters", counted(tenants=[["t", 1, 30]])),
    ("republish_events", (pack_for_script([["0.t.one", 0.5]]),)),
    ("republish_events", (pack_for_script([["0.t.one", INFINITE]]),)),
    ("restore_settings", ()),
    ("restore_settings", ("", "", "0", "mode")),
    ("restore_settings", ("", "x9", "0")),
    ("restore_settings", ("", "", "0", *["x"] * 2 * (limits.SETTINGS_PER_CALL + 1))),
    ("restore_prompt", (pack_for_script([["0.t.one", 5]]),)),
    ("status", (pack_for_script([5]),)),
]


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

    def test_when_a_client_makes_any_setting_then_the_queue_knows_it(self, one_queue: Queue) -> None:
        texts = {"durability": "aof", "features": ("json",), "mode": "fifo", "keep_prompts": "hash"}
        of_tenants: dict[str, Any] = {"weights": {"t": 2.0}, "max_running": {"t": 3}, "tokens_per_minute": {"t": 4}}
        values: dict[str, Any] = {field.name: 1 for field in fields(QueueSettings)} | texts | of_tenants

        one_queue.configure(**values)

        assert one_queue.hash_of("config").keys() >= values.keys() - of_tenants.keys()
        assert one_queue.hash_of("weights") == {"t": "2.0"}
        assert one_queue.hash_of("limits") == {"max_running:t": "3", "tokens_per_minute:t": "4"}

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
        [
            (0, 5),
            (1, None),
            (1, b"s" * 300_000),
            (2, [1]),
            (3, 7),
            (3, "x"),
            (3, "9" * 21),
            (4, 10),
            (4, "x"),
            (7, -1),
            (7, "x"),
            (8, 0),
            (8, 65),
            (9, ""),
            (9, "k" * 2000),
            (10, None),
            (11, ""),
            (11, "b" * 65),
            (12, INFINITE),
            (16, [["x"]]),
        ],
    )
    def test_when_a_submit_has_a_bad_row_then_none_of_it_is_written(
        self, one_queue: Queue, at: int, value: object
    ) -> None:
        bad: list[object] = [*ROW, *[None] * 6]
        bad[at] = value
        before = state_of(one_queue)

        with pytest.raises(redis.ResponseError):
            raw(one_queue, "submit", pack_for_script([["0.t.a", *ROW[1:]], bad]))

        assert state_of(one_queue) == before

    @pytest.mark.parametrize("job_id", ["1.t.a", "00.t.a", f"0.t.{'a' * 65}", f"0.{'t' * 65}.a", "0.T.a"])
    def test_when_a_submit_names_a_job_of_no_client_then_it_is_refused(self, one_queue: Queue, job_id: str) -> None:
        before = state_of(one_queue)

        (answer,) = cast("list[list[bytes]]", raw(one_queue, "submit", pack_for_script([[job_id, *ROW[1:]]])))

        assert answer[:2] == [b"refused", b"wrong_type"]
        assert state_of(one_queue) == before

    @pytest.mark.parametrize(("script", "arguments"), BAD_ARGUMENTS)
    def test_when_a_script_gets_them_then_it_writes_nothing(
        self, one_queue: Queue, script: str, arguments: tuple[Any, ...]
    ) -> None:
        one_queue.add("one")
        one_queue.worker("A").take()
        before = state_of(one_queue)

        with pytest.raises(redis.ResponseError):
            raw(one_queue, script, *arguments)

        assert state_of(one_queue) == before
