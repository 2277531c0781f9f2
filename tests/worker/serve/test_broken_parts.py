"""A worker whose loop or one of whose threads ends with an error: it says why, with the traceback, and is restarted."""

import io
import json
from collections.abc import Generator
from typing import Any

import pytest
import structlog

from sluice.worker.config import LogConfig
from sluice.worker.errors import ExitCode
from sluice.worker.log import configure_logs
from sluice.worker.serve.exchange import Exchange
from sluice.worker.serve.heartbeat import Heartbeat
from sluice.worker.serve.mailbox import Mailbox
from sluice.worker.serve.pull import Pulling
from tests.integration.jobs import wait_until
from tests.integration.workers import running_worker
from tests.servers import RedisServer


@pytest.fixture
def output() -> Generator[io.StringIO]:
    """The log, as JSON."""
    stream = io.StringIO()
    configure_logs(LogConfig(format="json"), stream=stream)
    yield stream
    structlog.reset_defaults()


def fail(*_: object) -> None:
    """End a thread, as a fault in this program does."""
    raise LookupError("nobody thought of this")


def end_of_worker(url: str, output: io.StringIO) -> tuple[ExitCode | None, dict[str, Any]]:
    """The exit code of a worker that ends by itself, and its last line but those of the shutdown."""
    with running_worker(url) as worker:
        wait_until(lambda: worker.exit_code is not None, "it ends by itself")
    lines = [json.loads(line) for line in output.getvalue().splitlines()]
    (line,) = [line for line in lines if line["event"] == "worker broken"]
    return worker.exit_code, line


class TestGivenAThreadThatEndsWithAnError:
    @pytest.mark.parametrize(
        ("part", "method", "name"),
        [(Exchange, "_turn", "exchange"), (Pulling, "_turn", "pulling"), (Heartbeat, "_tick", "heartbeat")],
        ids=["exchange", "pulling", "heartbeat"],
    )
    def test_when_the_loop_hears_of_it_then_the_traceback_of_the_thread_is_logged(
        self,
        valkey: RedisServer,
        output: io.StringIO,
        monkeypatch: pytest.MonkeyPatch,
        part: type[object],
        method: str,
        name: str,
    ) -> None:
        monkeypatch.setattr(part, method, fail)

        code, line = end_of_worker(valkey.url, output)

        assert code is ExitCode.BROKEN
        assert line["error"] == f"the {name} ended with LookupError: nobody thought of this"
        assert "in fail" in line["exception"]


class TestGivenALoopThatEndsWithAnErrorOfNoKnownKind:
    def test_when_it_ends_then_a_line_says_so_and_the_worker_asks_for_a_restart(
        self, valkey: RedisServer, output: io.StringIO, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Mailbox, "offer", fail)

        code, line = end_of_worker(valkey.url, output)

        assert code is ExitCode.BROKEN
        assert line["error"] == "LookupError: nobody thought of this"
        assert "in fail" in line["exception"]
        assert line["worker_id"]
