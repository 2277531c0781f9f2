"""Text that others control, on a terminal: it is shown, and the terminal obeys nothing in it."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.history.database import open_database
from sluice.history.tables import jobs
from sluice.producer import Producer
from sluice.protocol.host.terminal import printable
from sluice.protocol.states import JobState
from sluice.worker.recorder.migrate import migrate
from tests.end_to_end.processes import ROOT
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

ATTACK = "[/INST] [bold] :smile: \x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\N{RIGHT-TO-LEFT OVERRIDE}end"
STYLES = re.compile("\x1b\\[[0-9;]*m")
"""Colors, which rich writes around headers and numbers."""

Show = Callable[..., str]


@pytest.fixture
def show(valkey: RedisServer, tmp_path: Path) -> Show:
    """Run a command on a terminal; returns what the terminal gets, without colors."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    settings = {"SLUICE_REDIS_URL": valkey.url, "SLUICE_DATABASE_URL": f"sqlite:///{tmp_path / 'history.db'}"}

    def show(*command: str, code: int = 0) -> str:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"sluice.{command[0]}", *command[1:]],
            cwd=ROOT, env={**environ, **settings, "COLUMNS": "300", "TERM": "xterm"},
            stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        text = STYLES.sub("", _all_of(ours).decode().replace("\r\n", "\n"))
        assert process.wait() == code, text
        return text

    return show


def _all_of(terminal: int) -> bytes:
    found = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux says so when the last process has closed the other end
            piece = b""
        if not piece:
            os.close(terminal)
            return found
        found += piece


def failed_job(valkey: RedisServer) -> str:
    """A job that failed with the attack as its reason, and a lane of the history that says the same."""
    with Producer(valkey.url) as producer, valkey.client() as client:
        job = producer.submit("hello", model="[/INST]")
        worker = HandWorker(client)
        (leased,) = worker.pull()
        worker.say(leased, [], "", end=JobState.FAILED, error=ATTACK, code="invalid_request")
    return job.id


def is_harmless(text: str) -> bool:
    return printable(text) == text


class TestGivenAFailedJobWithAnAttackAsItsReason:
    @pytest.mark.parametrize("command", ["requeue --all", "jobs show {job}", "result {job}"])
    def test_when_it_is_shown_then_the_terminal_obeys_nothing(
        self, show: Show, valkey: RedisServer, command: str
    ) -> None:
        job_id = failed_job(valkey)

        text = show("producer", *command.format(job=job_id).split(), code=1 if command.startswith("result") else 0)

        assert "[/INST] [bold] :smile: " in text
        assert is_harmless(text), repr(text)

    def test_when_the_history_is_listed_then_the_terminal_obeys_nothing(self, show: Show, tmp_path: Path) -> None:
        engine = open_database(f"sqlite:///{tmp_path / 'history.db'}", is_writer=True)
        migrate(engine)
        row = {"id": "0.a.1", "queue": "default", "partition": 0, "tenant": "a", "version": 3, "state": "failed"}
        with engine.begin() as connection:
            connection.execute(jobs.insert().values({**row, "submitted_ms": 1, "choices": 1, "error": ATTACK}))
        engine.dispose()

        text = show("producer", "jobs", "list")

        assert "[/INST]" in text
        assert is_harmless(text), repr(text)


class TestGivenAJobWithAnAttackAsItsOutput:
    @pytest.mark.parametrize("command", ["stream {job}", "stream {job} --json", "result {job}", "result {job} --json"])
    def test_when_it_is_read_then_the_terminal_obeys_nothing(
        self, show: Show, valkey: RedisServer, command: str
    ) -> None:
        with Producer(valkey.url) as producer, valkey.client() as client:
            job, worker = producer.submit("hello"), HandWorker(client)
            (leased,) = worker.pull()
            worker.say(leased, [1], ATTACK[:30])
            worker.say(leased, [2], ATTACK[30:])
            worker.say(leased, [], "", end=JobState.DONE)

        text = show("producer", *command.format(job=job.id).split())

        assert "[/INST] [bold] :smile: " in text
        assert is_harmless(text), repr(text)


class TestGivenAWorkerWithAnAttackAsItsName:
    def test_when_workers_are_listed_then_the_terminal_obeys_nothing(self, show: Show, valkey: RedisServer) -> None:
        with valkey.client() as client:
            HandWorker(client).beat()
            client.hset("{default:0}:2:worker:hand", "name", ATTACK)

        text = show("worker", "status")

        assert "[/INST]" in text
        assert is_harmless(text), repr(text)


class TestGivenATableThatIsNotForATerminal:
    def test_when_a_cell_has_separators_then_they_are_spaces(
        self, valkey: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from sluice.producer.cli.common import show_table

        show_table(("a", "b"), [("x\ty\nz", "w")])

        assert capsys.readouterr().out == "a\tb\nx y z\tw\n"
