"""Passwords in URLs and signing keys do not appear in logs, messages, rows, process lists or files of other users."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.producer import Producer
from sluice.protocol.bulk_files.journal import Journal
from sluice.protocol.wire import JobId
from tests.end_to_end.processes import ROOT, WorkerProcess, worker_pool
from tests.integration.jobs import wait_until
from tests.servers import RedisServer

PASSWORD = "opensesame"
DATABASES = {
    "away": f"postgresql://ann:{PASSWORD}@127.0.0.1:1/history",
    "unknown": f"oracle://ann:{PASSWORD}@127.0.0.1:1/history",
    "broken": f"postgresql://ann:{PASSWORD}@127.0.0.1:port/history",
}
SERVERS = {
    "away": f"redis://ann:{PASSWORD}@127.0.0.1:1/0",
    "tls away": f"rediss://ann:{PASSWORD}@127.0.0.1:1/0?ssl_password={PASSWORD}",
    "sentinel": f"redis+sentinel://ann:{PASSWORD}@127.0.0.1:1/service/0?sentinel_password={PASSWORD}",
    "cluster": f"redis+cluster://ann:{PASSWORD}@127.0.0.1:1,127.0.0.1:2",
    "no port": f"redis://ann:{PASSWORD}@127.0.0.1:port/0",
    "no kind": f"http://ann:{PASSWORD}@127.0.0.1/",
}
COMMANDS = [
    ("worker", "doctor"),
    ("worker", "status"),
    ("worker", "start"),
    ("worker", "record"),
    ("worker", "callbacks"),
    ("worker", "migrate"),
    ("producer", "submit", "hello"),
    ("producer", "jobs", "list"),
    ("producer", "queues", "list"),
]


def output_of(command: tuple[str, ...], **settings: str) -> str:
    """All that a command prints, within a while."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    usual = {"SLUICE_MODEL": "null", "SLUICE_REDIS_PATIENCE_S": "0.2", "OMP_NUM_THREADS": "1"}
    secret = {"SLUICE_CALLBACKS_SECRET": PASSWORD} if command[1] == "callbacks" else {}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", f"sluice.{command[0]}", *command[1:]],
        cwd=ROOT, env={**environ, **usual, **secret, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=6)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, _ = process.communicate(timeout=20)
    return out.decode()


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
class TestGivenUrlsWithPasswords:
    @pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS.keys())
    def test_when_the_server_cannot_be_used_then_no_command_prints_them(
        self, command: tuple[str, ...], server: str, tmp_path: Path
    ) -> None:
        output = output_of(command, SLUICE_REDIS_URL=server, SLUICE_DATABASE_URL=f"sqlite:///{tmp_path}/h.db")

        assert PASSWORD not in output

    @pytest.mark.parametrize("database", DATABASES.values(), ids=DATABASES.keys())
    def test_when_the_database_cannot_be_used_then_no_command_prints_them(
        self, command: tuple[str, ...], database: str, valkey: RedisServer
    ) -> None:
        output = output_of(command, SLUICE_REDIS_URL=valkey.url, SLUICE_DATABASE_URL=database)

        assert PASSWORD not in output


class TestGivenAServerWithAPassword:
    def test_when_a_worker_runs_then_logs_process_list_and_history_do_not_have_it(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        with valkey.client() as client:
            client.execute_command("ACL", "SETUSER", "ann", "on", f">{PASSWORD}", "~*", "&*", "+@all")
        history, url = tmp_path / "history.db", f"unix://ann:{PASSWORD}@{valkey.socket_path}"
        with worker_pool(valkey.url, tmp_path, WorkerProcess) as workers, Producer(url) as producer:
            worker = workers.start(
                REDIS_URL=url, RECORDER="true", DATABASE_URL=f"sqlite:///{history}", CALLBACKS_SECRET=PASSWORD
            )
            worker.wait_until_started()
            job = producer.submit("hello", max_tokens=3, ignore_eos=True)
            producer.result(job, timeout_s=20)
            wait_until(lambda: history.exists() and str(job).encode() in _bytes_of(history), "the row is there")
            process = psutil.Process(worker.process.pid)
            lines = [" ".join(one.cmdline()) for one in (process, *process.children(recursive=True))]

            assert not any(PASSWORD in line for line in lines)
            assert PASSWORD not in worker.output
            assert PASSWORD.encode() not in _bytes_of(history)
            assert {oct(_mode(path)) for path in tmp_path.glob("history.db*")} == {"0o600"}
        with valkey.client() as client:
            assert not [key for key in client.keys("*") if PASSWORD.encode() in _dump(client, key)]


def test_when_a_journal_is_written_then_only_its_user_may_read_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as journal:
        journal.add(JobId("0.default.a"), 1)

    assert {_mode(path) for path in tmp_path.iterdir()} == {0o600}


def _bytes_of(history: Path) -> bytes:
    return b"".join(path.read_bytes() for path in history.parent.glob("history.db*"))


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _dump(client: Any, key: bytes) -> bytes:  # Any: a redis-py client
    return client.dump(key) or b""
