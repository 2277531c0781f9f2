"""`producer submit` once more, after lines of the file have moved or changed: no result gets the name of another."""

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sluice.producer import Producer
from tests.producer.cli.test_commands import rows, working, write_lines
from tests.producer.commands import Run
from tests.servers import RedisServer

SUBMIT = ("submit", "in.jsonl", "--batch", "b")
WAIT = (*SUBMIT, "--wait", "-o", "out.jsonl")
A, B, NEW = ('{"prompt": "a"}', '{"prompt": "b"}', '{"prompt": "new"}')
MOVED = "lines have different numbers than in an earlier run of this batch, for example"


@contextmanager
def pipe(*lines: str) -> Generator[str]:
    """The path of a pipe that has these lines."""
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "w") as file:
            file.writelines(f"{line}\n" for line in lines)
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)


class TestGivenAnOutputOfTwoLines:
    """a, b."""

    @pytest.fixture(autouse=True)
    def _output(self, run: Run, valkey: RedisServer, tmp_path: Path) -> None:
        write_lines(tmp_path / "in.jsonl", A, B)
        with working(valkey):
            run(*WAIT).output()

    @pytest.mark.parametrize(
        ("lines", "words"),
        [
            ((NEW, A, B), f"2 {MOVED} line-1 is now line-2"),
            ((B,), f"1 {MOVED} line-2 is now line-1"),
            ((A, NEW), "results of other jobs under the names of 1 lines, for example line-2"),
        ],
        ids=["inserted", "removed", "changed"],
    )
    def test_when_a_line_gets_the_name_of_another_then_nothing_is_submitted(
        self, run: Run, producer: Producer, tmp_path: Path, lines: tuple[str, ...], words: str
    ) -> None:
        before = (tmp_path / "out.jsonl").read_text()
        write_lines(tmp_path / "in.jsonl", *lines)

        ended = run(*WAIT)

        assert (ended.code, words in ended.err) == (1, True), ended
        assert producer.queue()[0].waiting_jobs == 0
        assert (tmp_path / "out.jsonl").read_text() == before

    def test_when_a_line_replaces_a_blank_and_one_is_added_then_each_name_comes_once(
        self, run: Run, valkey: RedisServer, tmp_path: Path
    ) -> None:
        write_lines(tmp_path / "in.jsonl", A, "", NEW)

        with working(valkey):
            run(*WAIT).output()

        assert sorted(row["custom_id"] for row in rows(tmp_path / "out.jsonl")) == ["line-1", "line-2", "line-3"]

    def test_when_another_server_gets_a_moved_line_then_the_output_tells(
        self, run: Run, valkey: RedisServer, tmp_path: Path
    ) -> None:
        with valkey.client() as client:
            client.flushall()
        write_lines(tmp_path / "in.jsonl", NEW, A, B)

        assert f"2 {MOVED} line-1 is now line-2" in run(*WAIT).err


class TestGivenLinesThatWereSubmitted:
    """a, b; no output was written."""

    def test_when_one_is_inserted_then_nothing_is_submitted(self, run: Run, producer: Producer, tmp_path: Path) -> None:
        write_lines(tmp_path / "in.jsonl", A, B)
        run(*SUBMIT).output()
        write_lines(tmp_path / "in.jsonl", NEW, A, B)

        ended = run(*SUBMIT)

        assert (ended.code, f"2 {MOVED} line-1 is now line-2" in ended.err) == (1, True), ended
        assert producer.queue()[0].waiting_jobs == 2

    def test_when_standard_input_has_one_more_in_front_then_nothing_is_submitted(
        self, run: Run, producer: Producer
    ) -> None:
        piped = ("submit", "-", "--batch", "b")
        run(*piped, stdin=f"{A}\n{B}\n".encode()).output()

        ended = run(*piped, stdin=f"{NEW}\n{A}\n{B}\n".encode())

        assert (ended.code, MOVED in ended.err) == (1, True), ended
        assert producer.queue()[0].waiting_jobs == 2

    def test_when_a_pipe_has_one_more_at_the_end_then_it_is_submitted(self, run: Run, producer: Producer) -> None:
        with pipe(A, B) as path:
            run("submit", path, "--batch", "b").output()
        with pipe(A, B, NEW) as path:
            ended = run("submit", path, "--batch", "b")

        assert (ended.code, "1 jobs submitted, 2 submitted before" in ended.err) == (0, True), ended
        assert producer.queue()[0].waiting_jobs == 3

    def test_when_a_pipe_has_no_batch_name_then_it_is_another_file(self, run: Run) -> None:
        for lines in ((A, B), (NEW, A)):
            with pipe(*lines) as path:
                ended = run("submit", path)

            assert (ended.code, "2 jobs submitted, 0 submitted before" in ended.err) == (0, True), ended

    def test_when_they_have_custom_ids_then_they_may_move(self, run: Run, producer: Producer, tmp_path: Path) -> None:
        named = [json.dumps({"prompt": name, "custom_id": name}) for name in ("new", "a", "b")]
        write_lines(tmp_path / "in.jsonl", *named[1:])
        run(*SUBMIT).output()
        write_lines(tmp_path / "in.jsonl", *named)

        ended = run(*SUBMIT)

        assert "1 jobs submitted, 2 submitted before" in ended.err
        assert producer.queue()[0].waiting_jobs == 3
