"""Results that have a key of their own: converted in little memory, and written alone."""

import json
import socket
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine
from structlog.testing import LogCapture

from sluice.history import results as converting
from sluice.history.database import compact_json
from sluice.history.results import large_result_columns, result_columns, result_of, small_result_columns
from sluice.history.rows import JobChange
from sluice.history.tables import jobs, results
from sluice.history.writer import HistoryWriter
from sluice.protocol.calls import inspect
from sluice.protocol.errors import WireError
from sluice.protocol.openai_format.logprobs import logprobs_from_json
from sluice.protocol.redis.execution import run
from sluice.protocol.wire import (
    ChoiceResult,
    JobId,
    JobResult,
    PromptResult,
    TokenLogprobs,
    Usage,
    decode_result,
    encode_result,
)
from sluice.worker.recorder import recorder as recording
from tests.history import events as e
from tests.history.test_recorder import OUTBOX, add, client_of, recorder, states
from tests.servers import RedisServer

TOKENS = (b"three", "größer".encode(), b"\xe2\x82", b"\0", None)


def position(number: int, **changes: Any) -> TokenLogprobs:
    """Log-probabilities at one position, with twenty others."""
    top = tuple(((100 * number + other) % 5000, -other / 7) for other in range(20))
    tokens = tuple(TOKENS[(number + other) % 5] for other in range(20))
    usual = TokenLogprobs(chosen=-0.25, top=top, token=TOKENS[number % 5], top_tokens=tokens, offset=3 * number)
    return replace(usual, **changes)


def encoded(*choices: ChoiceResult) -> bytes:
    """A result as workers store it."""
    usage = Usage(prompt_tokens=3, output_tokens=5, cached_tokens=1)
    return encode_result(JobResult(choices=choices, usage=usage, model="m"))


def choice(logprobs: Sequence[TokenLogprobs] | None, text: str = "three größer ☃\n") -> ChoiceResult:
    """A choice with a token for each position."""
    token_ids = tuple(range(7, 7 + len(logprobs or ())))
    kept = None if logprobs is None else tuple(logprobs)
    return ChoiceResult(text=text, token_ids=token_ids, finish_reason="stop", logprobs=kept)


PROMPT = PromptResult(text="so", token_ids=(1, 2), logprobs=(TokenLogprobs(chosen=0.0), position(1)))


@pytest.fixture(autouse=True)
def large_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a megabyte is large, so that tests are fast."""
    monkeypatch.setattr(converting, "LARGE_BYTES", 50_000)


def large(text: str = "three") -> bytes:
    """A large result."""
    data = encoded(choice([position(number) for number in range(500)], text))
    assert len(data) > converting.LARGE_BYTES
    return data


def peak_of(act: Callable[[], object]) -> int:
    """Bytes that are allocated at once, at most."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def as_stored(columns: Mapping[str, object]) -> dict[str, Any]:
    """Columns as they are read back."""
    return {name: json.loads(compact_json(value)) for name, value in columns.items()}


class TestGivenAResult:
    @pytest.mark.parametrize(
        "choices",
        [
            [],
            [choice([position(number) for number in range(9)]), choice(None), choice([])],
            [choice([position(number, token=None, top_tokens=(), offset=None) for number in range(3)])],
            [choice([position(0), position(1, top=(), top_tokens=(), offset=None), position(2)])],
            [ChoiceResult(text="", token_ids=(), finish_reason=None)],
            [replace(choice(None), vector=b"\0\0\x80?", prompt=PROMPT)],
            [replace(choice([position(0)]), prompt=replace(PROMPT, logprobs=None, is_echoed=True))],
            [choice([position(0)], text='a NUL \0, a quote " and a backslash \\')],
        ],
    )
    def test_when_it_is_converted_in_either_way_then_the_columns_are_equal(self, choices: list[ChoiceResult]) -> None:
        data = encoded(*choices)

        found = as_stored(large_result_columns(data))

        assert found == as_stored(small_result_columns(decode_result(data)))
        assert result_of(found["choices"], found["usage"], model="m") == decode_result(data)

    @pytest.mark.parametrize("convert", [large_result_columns, result_columns])
    def test_when_a_probability_is_zero_then_it_is_null_and_read_as_zero(
        self, convert: Callable[[bytes], Mapping[str, object]]
    ) -> None:
        infinite = float("-inf")

        columns = convert(encoded(choice([position(0, chosen=infinite, top=((4, infinite), (5, -1.0)))])))

        [stored] = as_stored(columns)["choices"]
        assert (stored["logprobs"][0]["chosen"], stored["logprobs"][0]["top"]) == (None, [[4, None], [5, -1.0]])
        [read] = logprobs_from_json(stored["logprobs"]) or (None,)
        assert read is not None
        assert (read.chosen, read.top) == (infinite, ((4, infinite), (5, -1.0)))


class TestGivenALargeResult:
    def test_when_it_is_converted_then_it_takes_a_quarter_of_its_objects_memory(self) -> None:
        data = large()

        peak_bytes = peak_of(lambda: result_columns(data))

        assert peak_bytes < peak_of(lambda: compact_json(small_result_columns(decode_result(data)))) / 4

    def test_when_its_json_is_too_large_then_all_but_its_logprobs_is_kept(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(converting, "MAX_JSON_BYTES", 100_000)

        found = result_columns(large())

        assert "not kept" in str(found.pop("record_error"))
        [one] = as_stored(found)["choices"]
        assert one.keys() == {"text", "token_ids", "finish_reason"}

    @pytest.mark.parametrize("cut", [0, 1, 50_000])
    def test_when_it_is_cut_then_it_is_no_result(self, cut: int) -> None:
        data = large()

        with pytest.raises(WireError):
            result_columns(data[:cut] if cut < 2 else data[:cut] + bytes(len(data)))


def end_with_key(valkey: RedisServer, job_id: str, data: bytes) -> e.Packed:
    """Store a result in its key, and return the job's end."""
    client_of(valkey).set(e.KEYS.result(JobId(job_id)), data)
    return e.ended(job_id, result_bytes=len(data))


class SizesOfWrites(HistoryWriter):
    """A writer that notes how many jobs each of its transactions has, and how many results."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.sizes: list[tuple[int, int]] = []

    def write(self, changes: Iterable[JobChange]) -> list[tuple[str, str]]:
        """Note and write."""
        changes = list(changes)
        self.sizes.append((len(changes), sum(change.result is not None for change in changes)))
        return super().write(changes)


class TestGivenEndsWhoseResultsHaveKeys:
    """Two in one entry; the key of a third has expired."""

    @pytest.fixture(autouse=True)
    def ended(self, valkey: RedisServer) -> list[e.Packed]:
        nul = large("\\u0000 is \0")
        ends = [end_with_key(valkey, "0.a.1", large()), end_with_key(valkey, "0.a.2", nul)]
        ends += [e.ended("0.a.3", result_bytes=9)]
        add(client_of(valkey), [e.submitted(f"0.a.{number}") for number in (1, 2, 3)], ends)
        return ends

    def test_when_recorded_then_each_is_kept_whole(self, valkey: RedisServer, history: Engine) -> None:
        recorder(valkey, history).drain()

        assert states(history) == dict.fromkeys(("0.a.1", "0.a.2", "0.a.3"), "done")
        with history.connect() as connection:
            found = dict(map(tuple, connection.execute(sa.select(results.c.job_id, results.c.choices))))
            errors = connection.execute(sa.select(jobs.c.record_error).order_by(jobs.c.id)).scalars().all()
        assert found.keys() == {"0.a.1", "0.a.2"}
        assert found["0.a.1"] == as_stored(small_result_columns(decode_result(large())))["choices"]
        is_cleaned = history.dialect.name == "postgresql"  # it keeps no NUL
        assert found["0.a.2"][0]["text"] == ("\\u0000 is \ufffd" if is_cleaned else "\\u0000 is \0")
        assert [error is not None for error in errors] == [False, is_cleaned, True]

    def test_when_one_is_gone_then_its_row_the_log_and_a_counter_say_so(
        self, valkey: RedisServer, history: Engine, log: LogCapture
    ) -> None:
        recorder(valkey, history).drain()

        with history.connect() as connection:
            error = connection.execute(sa.select(jobs.c.record_error).where(jobs.c.id == "0.a.3")).scalar_one()
        assert error == "its result of 9 bytes was deleted in the queue before it was read"
        said = [
            (line["job_id"], line["bytes"])
            for line in log.entries
            if line["event"] == "result is missing from the queue"
        ]
        assert said == [("0.a.3", 9)]
        assert run(client_of(valkey), inspect(e.KEYS)).results_missed == 1

    def test_when_one_is_gone_and_the_counter_is_damaged_then_the_others_are_kept(
        self, valkey: RedisServer, sqlite_history: Engine
    ) -> None:
        client_of(valkey).hset(e.KEYS.key("counters"), "results_missed", "x")

        recorder(valkey, sqlite_history).drain()

        assert states(sqlite_history) == dict.fromkeys(("0.a.1", "0.a.2", "0.a.3"), "done")

    def test_when_recorded_then_each_has_a_transaction_of_its_own(
        self, valkey: RedisServer, sqlite_history: Engine
    ) -> None:
        writer = SizesOfWrites(sqlite_history)
        settings = recording.RecorderSettings(queues=(e.QUEUE,), block_s=0.01)

        recording.Recorder(client_of(valkey), writer, settings).drain()

        assert writer.sizes == [(3, 0), (1, 1), (1, 1), (1, 0)]


class TestGivenEntriesThatAReaderLeft:
    def test_when_they_are_read_again_then_a_transaction_has_bounded_bytes(
        self, valkey: RedisServer, sqlite_history: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client, writer = client_of(valkey), SizesOfWrites(sqlite_history)
        add(client, *([e.submitted(f"0.a.{number}", prompt=e.prompt("x" * 1000))] for number in range(7)))
        settings = recording.RecorderSettings(queues=(e.QUEUE,), block_s=0.01)
        first = recording.Recorder(client, writer, settings)
        client.xgroup_create(OUTBOX, recording.GROUP, "0")
        client.xreadgroup(recording.GROUP, socket.gethostname(), {OUTBOX: ">"})
        monkeypatch.setattr(recording, "TURN_BYTES", 3000)

        assert first.drain() == 7

        assert writer.sizes == [(2, 0), (2, 0), (2, 0), (1, 0)]
        assert client.xlen(OUTBOX) == 0
