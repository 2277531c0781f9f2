"""The commands that a command suggests: copied, they find the same jobs on the same queue."""

import re
import shlex
from pathlib import Path

import pytest

from sluice.producer.cli import follow
from sluice.producer.errors import QueueUnreachable
from tests.producer.cli.test_commands import rows, working
from tests.producer.commands import Ended, Run
from tests.servers import RedisServer


@pytest.fixture(autouse=True)
def file(tmp_path: Path) -> Path:
    """An input whose name a shell would split."""
    path = tmp_path / "my file.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "two"}\n')
    return path


def words_of(ended: Ended, start: str) -> list[str]:
    """The words of a suggested command, after `producer`."""
    found = re.search(rf"{start}producer (.*?)(\. To run|\.?\n)", ended.err)
    assert found, ended.err
    return shlex.split(found[1])


class TestGivenAFileThatWasSubmitted:
    """Without waiting."""

    @pytest.mark.parametrize(
        "options",
        [
            (),
            ("--max-tokens", "8", "--temperature", "0", "--stop", "a b", "--stop", "$c", "--stream"),
            ("--tenant", "acme"),
            ("--queue", "other", "--batch", "q"),
            ("--partitions", "3", "--batch", "it"),
            ("--again", "--model", "m"),
            ("--callback-url", "https://example.org/?token=5"),
        ],
        ids=" ".join,
    )
    def test_when_the_next_command_is_run_then_no_job_is_submitted_again(
        self, run: Run, tmp_path: Path, options: tuple[str, ...]
    ) -> None:
        first = run("submit", "my file.jsonl", *options)

        words = words_of(first, "Next: ")
        again = run(*(word for word in words if word not in ("--wait", "-o", "out.jsonl")))

        assert "3 jobs submitted, 0 submitted before" in first.err
        assert words[4:7] == ["--wait", "-o", "out.jsonl"]
        assert "0 jobs submitted, 3 submitted before" in again.err

    @pytest.mark.parametrize("options", [("--tenant", "acme"), ("--temperature", "0")], ids=" ".join)
    def test_when_the_next_command_waits_then_the_results_are_there(
        self, run: Run, valkey: RedisServer, tmp_path: Path, options: tuple[str, ...]
    ) -> None:
        first = run("submit", "my file.jsonl", *options)

        with working(valkey):
            ended = run(*words_of(first, "Next: "))

        assert ended.code == 0
        assert len(rows(tmp_path / "out.jsonl")) == 3

    def test_when_the_tenant_is_another_then_the_jobs_are_others(self, run: Run) -> None:
        run("submit", "my file.jsonl", "--tenant", "acme")

        other = run("submit", "my file.jsonl")

        assert "3 jobs submitted, 0 submitted before" in other.err

    def test_when_a_url_has_a_password_then_it_is_not_printed(self, run: Run, valkey: RedisServer) -> None:
        url = valkey.tcp_url.replace("://", "://default:secret@")

        ended = run("submit", "my file.jsonl", "--redis-url", url)

        assert "secret" not in ended.err
        assert "--redis-url" in words_of(ended, "Next: ")


class TestGivenAnotherQueue:
    """In an option."""

    QUEUE = ("--queue", "a&b")

    def test_when_a_job_of_a_file_fails_then_the_suggested_command_requeues_it(
        self, run: Run, valkey: RedisServer
    ) -> None:
        with working(valkey, "a&b", fails=lambda _prompt: True):
            ended = run("submit", "my file.jsonl", "--wait", *self.QUEUE, "--batch", "b")

        assert run(*words_of(ended, "send their jobs back: ")).output() == "3 jobs requeued\n"

    def test_when_an_open_batch_is_over_then_the_suggested_command_closes_it(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, valkey: RedisServer
    ) -> None:
        monkeypatch.setattr(follow, "EVERY_S", 0.02)
        with working(valkey, "a&b"):
            run("submit", "my file.jsonl", "--wait", *self.QUEUE, "--batch", "b")

        ended = run("follow", "b", "--more-within", "0", *self.QUEUE)

        assert "is_closed\tTrue" in run(*words_of(ended, "still open: ")).output()

    def test_when_an_answer_breaks_off_then_the_suggested_command_reads_it(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, valkey: RedisServer
    ) -> None:
        def end(*_: object) -> None:
            raise QueueUnreachable("it is away")

        with monkeypatch.context() as patch:
            patch.setattr("sluice.producer.cli.main._print_events", end)
            asked = run("ask", "hello", *self.QUEUE)
        with working(valkey, "a&b"):
            read = run(*words_of(asked, "Read it later: "))

        assert (asked.code, read.code) == (1, 0)
        assert read.output() != "\n"
