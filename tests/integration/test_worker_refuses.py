"""Errors at a worker's start: one sentence with the remedy, an exit code, no traceback, no secret."""

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from sluice.history.database import VERSION_TABLE
from sluice.protocol.calls import QueueSettings, configure
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.worker.cli import main
from sluice.worker.errors import ExitCode
from tests.grids import fast_only
from tests.servers import RedisServer, redis_server


def invoke(*arguments: str, **environ: str) -> Result:
    """Run a command in this process."""
    result = CliRunner().invoke(main, list(arguments), env=environ)
    assert "Traceback" not in result.output
    return result


class Ended(NamedTuple):
    """A process that has ended."""

    exit_code: int
    output: str


def start(*arguments: str, **environ: str) -> Ended:
    """Run `worker start`, whose child must not get as far as serving."""
    command = [sys.executable, "-P", "-m", "sluice.worker", "start", *arguments]
    ended = subprocess.run(
        command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert "Traceback" not in ended.stdout
    return Ended(ended.returncode, ended.stdout)


@pytest.fixture(scope="module")
def guarded() -> Generator[RedisServer]:
    """A server with a password."""
    with redis_server("valkey", with_tcp=True) as server:
        with server.client() as client:
            client.config_set("requirepass", "right")  # pyright: ignore[reportUnknownMemberType]  # partial types
        yield server


class TestGivenWrongSettings:
    def test_when_started_then_every_problem_is_reported(self) -> None:
        result = start("--redis-url", "localhost", "--block-size", "many", SLUICE_NUM_BLOKS="3")

        assert result.exit_code == ExitCode.MISUSED
        for words in ("--redis-url", "--block-size: expected tokens as a whole number", "SLUICE_NUM_BLOKS"):
            assert words in result.output

    def test_when_engine_settings_contradict_each_other_then_it_is_reported(self, valkey: RedisServer) -> None:
        result = start(
            "--model",
            "null",
            "--redis-url",
            valkey.url,
            "--max-num-seqs",
            "9",
            "--max-num-batched-tokens",
            "3",
        )

        assert result.exit_code == ExitCode.MISUSED
        assert "max_num_batched_tokens (3) must be at least max_num_seqs (9)" in result.output

    def test_when_both_devices_are_asked_for_then_it_is_misuse(self) -> None:
        assert start("--gpu", "0", "--cpu").exit_code == ExitCode.MISUSED


class TestGivenARedisThatIsNotThere:
    def test_when_started_then_it_waits_and_asks_to_be_started_later(self, tmp_path: Path) -> None:
        url = f"unix://{tmp_path}/nobody.sock"
        began_s = time.monotonic()

        result = start("--model", "null", "--redis-url", url, "--redis-patience", "0.3")

        assert result.exit_code == ExitCode.NOT_READY
        assert "did not answer within 0.3 s" in result.output
        assert time.monotonic() - began_s >= 0.3

    @pytest.mark.parametrize("command", ["doctor", "status"])
    def test_when_looked_at_then_it_says_so(self, tmp_path: Path, command: str) -> None:
        result = invoke(command, "--redis-url", f"unix://{tmp_path}/nobody.sock")

        assert result.exit_code != 0
        assert "does not answer" in result.output


class TestGivenAServerThatIsNotForUs:
    @pytest.mark.long
    def test_when_the_password_is_wrong_then_it_is_said_and_not_shown(self, guarded: RedisServer) -> None:
        url = f"redis://:hunter2@127.0.0.1:{guarded.port}"

        result = start("--model", "null", "--redis-url", url)

        assert result.exit_code == ExitCode.MISUSED
        assert "refuses this user" in result.output
        assert "hunter2" not in result.output

    def test_when_it_evicts_then_jobs_would_be_lost_and_it_is_refused(self, valkey: RedisServer) -> None:
        with valkey.client() as client:
            client.config_set("maxmemory-policy", "allkeys-lru")  # pyright: ignore[reportUnknownMemberType]  # partial
            try:
                result = start("--model", "null", "--redis-url", valkey.url)
            finally:
                client.config_set("maxmemory-policy", "noeviction")  # pyright: ignore[reportUnknownMemberType]  # partial

        assert result.exit_code == ExitCode.MISUSED
        assert "maxmemory-policy is allkeys-lru" in result.output


class TestGivenAModelThatIsNotThere:
    @pytest.mark.parametrize(
        ("model", "words"),
        fast_only(
            [("plain", "is not a folder")],
            [("/nowhere/model", "is not a folder"), ("null?speed=3", "has no option speed=3")],
        ),
    )
    def test_when_started_then_it_is_said(self, valkey: RedisServer, model: str, words: str) -> None:
        result = start("--redis-url", valkey.url, "--model", model)

        assert result.exit_code == ExitCode.MISUSED
        assert words in result.output

    @pytest.mark.long
    def test_when_it_is_a_name_and_the_network_is_away_then_it_is_said(self, valkey: RedisServer) -> None:
        result = start("--redis-url", valkey.url, "--model", "nobody/nothing", "--no-recorder", HF_HUB_OFFLINE="1")

        assert result.exit_code == ExitCode.MISUSED
        assert "nobody/nothing is not a folder on this host" in result.output

    @pytest.mark.long
    def test_when_its_folder_is_empty_then_it_is_said(self, valkey: RedisServer, tmp_path: Path) -> None:
        result = start("--redis-url", valkey.url, "--model", str(tmp_path))

        assert result.exit_code == ExitCode.MISUSED
        assert "has no config.json" in result.output


class TestGivenAHistoryOfAnotherRelease:
    def test_when_it_is_newer_then_the_worker_says_what_to_do(self, valkey: RedisServer, tmp_path: Path) -> None:
        path = tmp_path / "history.db"
        with sqlite3.connect(path) as database:
            database.execute(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL)")
            database.execute(f"INSERT INTO {VERSION_TABLE} VALUES ('9999')")
        database.close()

        result = start("--redis-url", valkey.url, "--model", "null", "--database-url", f"sqlite:///{path}")

        assert result.exit_code == ExitCode.MISUSED
        assert "the history has schema 9999" in result.output


class TestGivenAWellServer:
    def test_when_the_doctor_looks_then_it_says_what_it_found(self, valkey: RedisServer, tmp_path: Path) -> None:
        database = f"sqlite:///{tmp_path}/history.db"

        result = invoke("doctor", "--redis-url", valkey.url, "--database-url", database, "--model", "null")

        for words in (
            "Valkey 9",
            "noeviction",
            "ms a round trip",
            "will be created at the first start",
            "the null model",
        ):
            assert words in result.output
        assert "ok     durability memory: possible" in result.output
        for level in ("aof", "fsync", "replica:1"):
            assert f"note   durability {level}: not possible" in result.output
        # The tests' server keeps nothing on disk, and the doctor must mind.
        assert "warn   redis persistence: no append-only file" in result.output
        assert result.exit_code == ExitCode.BROKEN


class TestGivenAServerThatSyncsAtEachWrite:
    def test_when_the_doctor_runs_then_disk_levels_are_possible_and_replicas_are_not(
        self, durable_valkey: RedisServer, tmp_path: Path
    ) -> None:
        with durable_valkey.client() as client:
            client.config_set("appendfsync", "always")

        result = doctor_says(durable_valkey, tmp_path)

        assert "append-only file is on, appendfsync always, has WAITAOF" in result.output
        assert "durability fsync: possible" in result.output
        assert "durability replica:1: not possible: 0 of 1 replicas follow it" in result.output
        assert result.exit_code == ExitCode.DONE

    def test_when_the_queue_s_default_cannot_be_promised_then_the_doctor_minds(
        self, durable_valkey: RedisServer, tmp_path: Path
    ) -> None:
        with durable_valkey.client() as client:
            run(client, configure(QueueKeys("default"), QueueSettings(durability="fsync")))

        result = doctor_says(durable_valkey, tmp_path)

        assert "queue durability: fsync is not possible" in result.output
        assert "Set `appendfsync always` there" in result.output
        assert result.exit_code == ExitCode.BROKEN


class TestGivenAQueueWhoseClockATestHasMoved:
    @pytest.mark.parametrize("name", ["test_clock_ms", "test_clock_offset_ms"])
    def test_when_the_doctor_runs_then_it_is_a_problem_in_any_partition_until_removed(
        self, durable_valkey: RedisServer, tmp_path: Path, name: str
    ) -> None:
        with durable_valkey.client() as client:
            client.hset("{default:1}:2:config", name, 1000)
            result = doctor_says(durable_valkey, tmp_path, SLUICE_PARTITIONS="2")
            assert f"{name} is 1000" in result.output
            assert f"HDEL {{default:1}}:2:config {name}" in result.output
            assert result.exit_code == ExitCode.BROKEN

            client.hdel("{default:1}:2:config", name)

        assert doctor_says(durable_valkey, tmp_path, SLUICE_PARTITIONS="2").exit_code == ExitCode.DONE


def doctor_says(server: RedisServer, folder: Path, **environ: str) -> Result:
    """What `worker doctor` prints."""
    database = f"sqlite:///{folder}/h.db"
    return invoke("doctor", "--redis-url", server.url, "--database-url", database, "--model", "null", **environ)
