"""The files of `producer submit` that it must not write: its input, and what somebody else wrote."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.producer.cli.test_commands import working
from tests.producer.commands import Run
from tests.servers import RedisServer

# The last line has no newline: an output that is continued would lose it.
LINES = '{"prompt": "one"}\n{"prompt": "two"}'


class TestGivenAnInput:
    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> Path:
        """The input."""
        path = tmp_path / "in.jsonl"
        path.write_text(LINES)
        return path

    @pytest.mark.parametrize(
        "outputs",
        [("-o", "in.jsonl"), ("-o", "out.jsonl", "--errors", "./in.jsonl"), ("-o", "x", "--errors", "x")],
        ids=lambda outputs: " ".join(outputs),
    )
    def test_when_two_uses_have_one_file_then_that_is_misuse(
        self, run: Run, valkey: RedisServer, file: Path, outputs: tuple[str, ...]
    ) -> None:
        with working(valkey):
            ended = [run("submit", "in.jsonl", "--wait", *outputs, *more) for more in ((), ("--again",))]

        assert [one.code for one in ended] == [2, 2]
        assert all("different files" in one.err for one in ended)
        assert file.read_text() == LINES

    @pytest.mark.parametrize("link", [os.link, os.symlink])
    def test_when_an_output_is_a_link_to_it_then_that_is_misuse(
        self, run: Run, valkey: RedisServer, file: Path, link: Callable[[Path, Path], None]
    ) -> None:
        link(file, file.with_name("out.jsonl"))

        with working(valkey):
            ended = run("submit", "in.jsonl", "--wait", "-o", "out.jsonl")

        assert ended.code == 2
        assert "different files" in ended.err
        assert file.read_text() == LINES

    @pytest.mark.parametrize("option", ["-o", "--errors"])
    @pytest.mark.parametrize("more", [(), ("--again",)], ids=str)
    def test_when_an_output_has_something_else_then_it_is_refused_and_stays(
        self, run: Run, valkey: RedisServer, tmp_path: Path, option: str, more: tuple[str, ...]
    ) -> None:
        (tmp_path / "notes.jsonl").write_text(LINES)

        with working(valkey):
            ended = run("submit", "in.jsonl", "--wait", option, "notes.jsonl", *more)

        assert ended.code == 2
        assert "'notes.jsonl' has something other than results" in ended.err
        assert "jobs submitted" not in ended.err
        assert (tmp_path / "notes.jsonl").read_text() == LINES

    @pytest.mark.parametrize("left", ["", '{"id":"batch_', '{"id":"batch_req_5", "custom', '{"id": "batch_req_5"}\n'])
    def test_when_an_output_begins_with_a_result_or_a_part_then_it_is_continued(
        self, run: Run, valkey: RedisServer, tmp_path: Path, left: str
    ) -> None:
        (tmp_path / "out.jsonl").write_text(left)

        with working(valkey):
            ended = run("submit", "in.jsonl", "--wait", "-o", "out.jsonl")

        assert ended.code == 0
        assert (tmp_path / "out.jsonl").read_text().count("\n") == left.count("\n") + 2
