"""`worker callbacks` is stopped or killed while a webhook waits for its next try; another one continues at once."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from rq.scheduler import RQScheduler

from sluice.protocol.keys import QueueKeys
from sluice.worker.cli import main
from sluice.worker.errors import ExitCode
from tests.history import events as e
from tests.history.test_recorder import client_of, until
from tests.servers import RedisServer
from tests.worker.callbacks.receiver import Receiver, receiver
from tests.worker.callbacks.test_callbacks import SECRET, end_job, mover, settings_for, webhooks_of, work

PATIENCE_S = 40.0
"""For two processes to start on a busy machine. A lock of rq's scheduler lasts 61 s."""


@pytest.fixture
def hook() -> Generator[Receiver]:
    """A receiver that answers with 500."""
    with receiver() as state:
        state.answers += [500] * 20
        yield state


@contextmanager
def callbacks(
    valkey: RedisServer, database_url: str, log: Path, *, queue: str = e.QUEUE
) -> Generator[subprocess.Popen[bytes]]:
    """The command, logging to a file; killed with its children if the test fails."""
    environ = {
        **os.environ, "SLUICE_REDIS_URL": valkey.url, "SLUICE_DATABASE_URL": database_url, "SLUICE_QUEUE": queue,
        "SLUICE_CALLBACKS_SECRET": SECRET, "SLUICE_CALLBACKS_NETWORKS": "127.0.0.0/8",
        "SLUICE_CALLBACKS_SENDERS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "sluice.worker", "callbacks"]
    with log.open("wb") as file, subprocess.Popen(command, env=environ, stdout=file, stderr=file) as process:
        try:
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[bytes], by: signal.Signals) -> None:
    """Send a signal, and wait until the process and its rq workers have ended."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(by)
    process.wait(60)
    psutil.wait_procs(family, timeout=60)


@pytest.mark.slow
class TestGivenAWebhookThatWaitsForItsNextTry:
    @pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
    @pytest.mark.long
    def test_when_callbacks_are_restarted_then_it_is_tried_at_once(
        self, valkey: RedisServer, sqlite_url: str, hook: Receiver, tmp_path: Path, by: signal.Signals
    ) -> None:
        client = client_of(valkey)
        queue = webhooks_of(settings_for(valkey), client)
        waiting = queue.scheduled_job_registry
        end_job(client, hook.url)
        with callbacks(valkey, sqlite_url, tmp_path / "first") as first:
            until(lambda: waiting.count == 1, "the first try has failed", patience_s=PATIENCE_S)
            end(first, by)
        assert by is signal.SIGKILL or not client.exists(RQScheduler.get_locking_key(queue.name))
        tries = len(hook.got)

        with callbacks(valkey, sqlite_url, tmp_path / "second") as second:
            until(lambda: len(hook.got) > tries, "another try", patience_s=PATIENCE_S)
            end(second, signal.SIGTERM)

        assert len({headers["webhook-id"] for headers, _ in hook.got}) == 1

    @pytest.mark.long
    def test_when_a_try_fails_then_each_line_of_the_log_is_json(
        self, valkey: RedisServer, sqlite_url: str, hook: Receiver, tmp_path: Path
    ) -> None:
        end_job(client_of(valkey), hook.url)

        with callbacks(valkey, sqlite_url, tmp_path / "log") as process:
            until(lambda: len(hook.got) == 2, "it was tried twice", patience_s=PATIENCE_S)
            end(process, signal.SIGTERM)

        lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert any("WebhookFailed" in line["event"] for line in lines), "rq's traceback is among them"


@pytest.mark.slow
class TestGivenSeveralQueues:
    def test_when_jobs_of_each_end_then_their_webhooks_are_sent(
        self, valkey: RedisServer, sqlite_url: str, hook: Receiver, tmp_path: Path
    ) -> None:
        hook.answers.clear()
        client = client_of(valkey)
        end_job(client, hook.url)
        end_job(client, hook.url, "0.acme.2", stream=QueueKeys("other").callbacks)

        with callbacks(valkey, sqlite_url, tmp_path / "log", queue=f"{e.QUEUE}:3 other") as process:
            until(lambda: len(hook.got) == 2, "both were sent", patience_s=PATIENCE_S)
            end(process, signal.SIGTERM)

        assert process.returncode == 0
        assert {json.loads(body)["data"]["queue"] for _, body in hook.got} == {e.QUEUE, "other"}


@pytest.mark.slow
class TestGivenAServerThatGoesAway:
    @pytest.mark.long
    def test_when_it_is_back_then_its_outage_was_logged_once_and_webhooks_go_on(
        self, durable_valkey: RedisServer, sqlite_url: str, hook: Receiver, tmp_path: Path
    ) -> None:
        hook.answers.clear()
        log = tmp_path / "log"

        def events() -> list[str]:
            return [json.loads(line)["event"] for line in log.read_text().splitlines()]

        with callbacks(durable_valkey, sqlite_url, log) as process:
            end_job(client_of(durable_valkey), hook.url)
            until(lambda: len(hook.got) == 1, "a webhook was sent", patience_s=PATIENCE_S)
            before = len(events())
            durable_valkey.kill()
            until(lambda: "redis unreachable" in events(), "the outage is logged", patience_s=PATIENCE_S)
            durable_valkey.start()
            end_job(client_of(durable_valkey), hook.url, "0.acme.2")
            until(lambda: len(hook.got) == 2, "another was sent", patience_s=PATIENCE_S)
            lines = events()[before:]
            end(process, signal.SIGTERM)

        assert [line for line in lines if "delivered" not in line] == ["redis unreachable", "redis reachable again"]


class TestGivenNoServer:
    def test_when_callbacks_are_started_then_they_exit_with_3_after_the_patience(self, sqlite_url: str) -> None:
        asked = ["callbacks", "--redis-url", "unix:///nowhere/none.sock", "--redis-patience", "0"]

        ended = CliRunner().invoke(main, [*asked, "--database-url", sqlite_url])

        assert ended.exit_code == ExitCode.NOT_READY
        assert "redis at unix:///nowhere/none.sock does not answer" in ended.output


class TestGivenAnotherSchedulerThatHoldsTheLock:
    def test_when_it_lets_go_then_the_mover_enqueues_what_is_due(self, valkey: RedisServer, hook: Receiver) -> None:
        client = client_of(valkey)
        queue = webhooks_of(settings_for(valkey), client)
        lock = RQScheduler.get_locking_key(queue.name)
        end_job(client, hook.url)
        mover(valkey, retry_after_s=(1,)).drain()
        work(client, settings_for(valkey))
        client.zadd(queue.scheduled_job_registry.key, {queue.scheduled_job_registry.get_job_ids()[0]: 1})
        client.set(lock, "another")

        mover(valkey).drain()
        assert queue.count == 0
        client.delete(lock)
        mover(valkey).drain()

        assert queue.count == 1
        assert not client.exists(lock)
