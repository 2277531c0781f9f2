"""`worker doctor` finds what `worker start` refuses, in the same words, and neither crashes."""

import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from sluice.history.database import VERSION_TABLE
from sluice.producer import JobId, Producer
from sluice.worker.checks.queue_check import check_queues
from sluice.worker.checks.redis_check import check_redis
from sluice.worker.checks.site import Site
from sluice.worker.checks.startup import MODEL_CHECKS, SERVER_CHECKS, require
from sluice.worker.cli import main
from sluice.worker.config import load_config
from sluice.worker.connection.clients import connect
from sluice.worker.errors import ConfigError, ExitCode, NotReady
from sluice.worker.log import get_log
from sluice.worker.model.folders import SMALL_MODEL
from tests.grids import fast_only
from tests.integration.jobs import wait_until
from tests.servers import RedisServer

PROGRAM = (sys.executable, "-P", "-m", "sluice.worker")
WITHOUT_POWERS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-net_bind_service")
"""How root runs a program as any other user would: bound by permissions of files and ports."""


class Scene(NamedTuple):
    """A server, and a folder for what is broken."""

    url: str
    folder: Path


@pytest.fixture
def scene(valkey: RedisServer, tmp_path: Path) -> Scene:
    return Scene(valkey.url, tmp_path)


def usual(scene: Scene) -> list[str]:
    """Settings of a worker that would start."""
    history = f"sqlite:///{scene.folder}/history.db"
    return ["--redis-url", scene.url, "--model", "null", "--database-url", history, "--metrics-port", "0"]


def start(*settings: str, before: tuple[str, ...] = (), **environ: str) -> tuple[int, str]:
    """The exit code and the output of a worker that must not get as far as loading its model."""
    # Its parent would take as long again, and passes the output and the code on.
    with subprocess.Popen(
        [*before, *PROGRAM, "start", "--until-eof", *settings],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **environ},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        output = process.stdout.read()
    assert "Traceback" not in output
    assert "model loaded" not in output
    return process.returncode, output


def problems_in(output: str) -> list[str]:
    """The sentences of a `ConfigError`, of which the first line counts the others."""
    _, _, listed = output.partition("wrong:\n  ")
    return listed.rstrip().split("\n  ")


def doctor(*settings: str) -> str:
    """What the doctor prints."""
    result = CliRunner().invoke(main, ["doctor", *settings])
    assert result.exit_code == ExitCode.BROKEN
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def found_wrong(output: str) -> list[str]:
    """The sentences that the doctor calls wrong."""
    return re.findall(r"^WRONG  [\w ]+: (.*)$", output, re.MULTILINE)


def newer_history(scene: Scene) -> list[str]:
    with sqlite3.connect(scene.folder / "history.db") as database:
        database.execute(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL)")
        database.execute(f"INSERT INTO {VERSION_TABLE} VALUES ('9999')")
    database.close()
    return []


def foreign_key(scene: Scene) -> list[str]:
    connect(scene.url, timeout_s=5).set("{default:0}:2:dead", "of another program")
    return []


def blocked_job_left_out(scene: Scene) -> list[str]:
    with Producer(scene.url, partitions=3) as producer:
        parent = producer.submit("parent", job_id=JobId("0.default.parent"))
        producer.submit("child", job_id=JobId("2.default.child"), after=[parent])
    return []


def model_with(scene: Scene, file: str, content: str) -> list[str]:
    """A copy of the small model in which one file is broken."""
    folder = scene.folder / "model"
    shutil.copytree(SMALL_MODEL, folder)
    (folder / file).write_text(content)
    return ["--model", str(folder)]


def broken_template(scene: Scene) -> list[str]:
    return model_with(scene, "chat_template.jinja", "{% for message in messages %}")


Break = Callable[[Scene], list[str]]

BROKEN: dict[str, Break] = {
    "engine settings": lambda _: ["--max-num-seqs", "9", "--max-num-batched-tokens", "3"],
    "metrics host": lambda _: ["--metrics-host", "203.0.113.7"],
    "metrics name": lambda _: ["--metrics-host", "nowhere.invalid"],
    "sqlite folder": lambda scene: ["--database-url", f"sqlite:///{scene.folder}/no/such/history.db"],
    "driver": lambda _: ["--database-url", "postgresql+asyncpg://db/history"],
    "database option": lambda _: ["--database-url", "postgresql://db/history?prepare_threshold=0"],
    "database in memory": lambda _: ["--database-url", "sqlite://"],
    "newer history": newer_history,
    "null option": lambda _: ["--model", "null?speed=3"],
    "foreign key": foreign_key,
    "blocked job left out": blocked_job_left_out,
}
IN_FAST = ("engine settings", "newer history", "foreign key", "blocked job left out")
"""Of these, what the fast suite starts a process for."""

BROKEN_MODELS: dict[str, Break] = {
    "template": broken_template,
    "tokenizer": lambda scene: model_with(scene, "tokenizer.json", "{}"),
    "config": lambda scene: model_with(scene, "config.json", '{"model_type": "unheard-of"}'),
    "context": lambda _: ["--model", str(SMALL_MODEL), "--max-model-len", "1000000"],
    "cache": lambda _: ["--model", str(SMALL_MODEL), "--max-model-len", "64", "--num-blocks", "3"],
    "gpu": lambda _: ["--model", str(SMALL_MODEL), "--gpu", "9"],
}


class TestGivenABrokenSetting:
    @pytest.mark.parametrize("name", fast_only(IN_FAST, [name for name in BROKEN if name not in IN_FAST]))
    def test_when_started_or_examined_then_the_sentence_is_the_same(self, scene: Scene, name: str) -> None:
        settings = [*usual(scene), *BROKEN[name](scene)]

        code, output = start(*settings)

        assert code == ExitCode.MISUSED
        assert problems_in(output) == found_wrong(doctor(*settings))

    @pytest.mark.long
    @pytest.mark.parametrize("broken", BROKEN_MODELS.values(), ids=list(BROKEN_MODELS))
    def test_when_it_is_the_model_s_then_the_sentence_is_the_same(self, scene: Scene, broken: Break) -> None:
        settings = [*usual(scene), *broken(scene)]

        code, output = start(*settings)

        assert code == ExitCode.MISUSED
        assert problems_in(output) == found_wrong(doctor(*settings))

    def test_when_it_is_the_chat_template_then_both_refuse_it(self, scene: Scene) -> None:
        settings = [*usual(scene), *broken_template(scene)]
        flags = {"redis.url": scene.url, "model.path": settings[-1], "history.recorder": False, "metrics.port": 0}
        site = Site(load_config({}, flags=flags), {}, get_log(), patience_s=0)

        with pytest.raises(ConfigError, match="the model's chat template is not valid") as caught:
            require((*SERVER_CHECKS, *MODEL_CHECKS), site, get_log())

        assert list(caught.value.problems) == found_wrong(doctor(*settings))


class TestGivenAUserWithoutRights:
    """Not root, or root without its powers."""

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            (["--metrics-port", "80"], "SLUICE_METRICS_PORT: this user may not listen on port 80"),
            (["--database-url", "sqlite:///{home}/history.db"], "{home} cannot be written"),
        ],
        ids=["port", "folder"],
    )
    def test_when_a_worker_starts_then_it_is_refused(self, scene: Scene, settings: list[str], sentence: str) -> None:
        scene.folder.chmod(0o500)
        asked = [one.format(home=scene.folder) for one in settings]

        code, output = start(*usual(scene), *asked, before=WITHOUT_POWERS if os.getuid() == 0 else ())

        assert code == ExitCode.MISUSED
        assert sentence.format(home=scene.folder) in output

    def test_when_the_home_is_not_writable_then_the_doctor_says_so(self, scene: Scene) -> None:
        scene.folder.chmod(0o500)
        home = {"HOME": str(scene.folder), "XDG_STATE_HOME": "", "SLUICE_STATE_DIR": ""}

        done = subprocess.run(
            [*(WITHOUT_POWERS if os.getuid() == 0 else ()), *PROGRAM, "doctor", "--model", "null"],
            env={**os.environ, **home}, capture_output=True, text=True, check=False,
        )  # fmt: skip

        assert done.stderr == ""
        assert done.returncode == ExitCode.BROKEN
        assert "WRONG  history: SLUICE_STATE_DIR: the state folder cannot be created" in done.stdout
        assert "WRONG  redis: SLUICE_REDIS_URL: cannot use the state folder" in done.stdout


class TestGivenServersThatAreAway:
    def test_when_the_database_is_then_a_worker_warns_and_starts(self, scene: Scene) -> None:
        away = ["--database-url", f"postgresql://db/history?host={scene.folder}"]

        output = doctor(*usual(scene), *away)

        assert "warn   history: does not answer" in output
        assert found_wrong(output) == []


REFUSALS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no replicas": (("CONFIG", "SET", "min-replicas-to-write", "1"), ("CONFIG", "SET", "min-replicas-to-write", "0")),
    "a failover": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
}
"""Commands after which a server takes no writes, and those after which it takes them again."""


@contextmanager
def refusing(scene: Scene, name: str) -> Generator[Callable[[], object]]:
    """Let the server take no writes; yield what ends that."""
    begin, end = REFUSALS[name]
    client = connect(scene.url, timeout_s=5)
    client.execute_command(*begin)
    try:
        yield lambda: client.execute_command(*end)
    finally:
        client.execute_command(*end)


def site_of(scene: Scene, *, patience_s: float) -> Site:
    """The scene, as a worker of the null model looks at it."""
    flags = {"redis.url": scene.url, "model.path": "null", "history.recorder": False, "metrics.port": 0}
    return Site(load_config({}, flags=flags), {}, get_log(), patience_s=patience_s)


def events_of(lines: Sequence[Mapping[str, object]]) -> list[object]:
    """What was logged."""
    return [line["event"] for line in lines]


class TestGivenAServerThatTakesNoWritesForNow:
    """Its settings are right, so an exit that nobody restarts would be wrong."""

    @pytest.mark.parametrize("name", REFUSALS)
    def test_when_a_worker_checks_all_then_it_waits_as_for_one_that_is_away(self, scene: Scene, name: str) -> None:
        site = site_of(scene, patience_s=60)
        with refusing(scene, name) as end, capture_logs() as lines, ThreadPoolExecutor(1) as thread:
            checked = thread.submit(lambda: require((*SERVER_CHECKS, *MODEL_CHECKS), site, get_log()))
            wait_until(lambda: "waiting for redis" in events_of(lines) or checked.done(), "it waits, or it is done")

            end()

            checked.result(60)
        assert events_of(lines).count("waiting for redis") == 1

    @pytest.mark.parametrize("name", REFUSALS)
    def test_when_that_lasts_then_the_worker_asks_to_be_started_later(self, scene: Scene, name: str) -> None:
        site = site_of(scene, patience_s=0.1)
        with refusing(scene, name), pytest.raises(NotReady, match="refused requests for") as caught:
            require((*SERVER_CHECKS, *MODEL_CHECKS), site, get_log())

        assert caught.value.exit_code == ExitCode.NOT_READY

    def test_when_it_remains_a_replica_then_the_advice_names_the_primary(self, scene: Scene) -> None:
        site = site_of(scene, patience_s=0.1)
        with refusing(scene, "a failover"), pytest.raises(NotReady, match="give the primary's URL"):
            list(check_redis(site))


class TestGivenAUserWhoMayNotRunAllCommandsOfScripts:
    def test_when_the_queue_is_checked_then_the_server_s_words_are_given(self, scene: Scene) -> None:
        client = connect(scene.url, timeout_s=5)
        client.execute_command("ACL", "SETUSER", "poor", "on", "nopass", "~*", "&*", "+@all", "-hgetall")
        poor = scene._replace(url=scene.url.replace("unix://", "unix://poor:any@"))

        with pytest.raises(ConfigError, match="lacks a right that a worker needs") as caught:
            list(check_queues(site_of(poor, patience_s=0)))

        assert "hgetall" in str(caught.value)
        assert "Remove or rename" not in str(caught.value)


class TestGivenTakenPorts:
    def test_when_examined_then_it_warns_and_names_them(self, scene: Scene) -> None:
        with socket.create_server(("127.0.0.1", 65535)):
            output = doctor(*usual(scene), "--metrics-port", "65535")

        assert "warn   metrics: ports 65535 to 65535 of 127.0.0.1 are taken" in output
