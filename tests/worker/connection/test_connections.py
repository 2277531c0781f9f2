"""A client's connection: used again, made anew once the server has closed it, and no command is sent twice."""

import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from sluice.protocol.redis.execution import run_commands
from sluice.worker.connection.clients import connect
from tests.chaos.faults.proxies import cutting_proxy
from tests.servers import RedisServer

INCREMENT = ("INCR", "n")


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:  # redis-py types it in part
    client = connect(valkey.url, timeout_s=5)
    yield client
    client.connection_pool.disconnect()


@contextmanager
def hanging(server: RedisServer) -> Generator[socket.socket]:
    """Listen in place of a server, and never reply."""
    server.stop()
    server.socket_path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(server.socket_path))
        listening.listen()
        try:
            yield listening
        finally:
            server.start()


def num_connections(listening: socket.socket) -> int:
    """Accept what waits, and count it."""
    listening.setblocking(False)
    count = 0
    with suppress(BlockingIOError):
        while True:
            listening.accept()[0].close()
            count += 1
    return count


class TestGivenAServer:
    def test_when_round_trips_are_made_then_all_use_one_connection(self, client: Any) -> None:
        ids = {run_commands(client, [("CLIENT", "ID")])[0] for _ in range(3)}

        assert len(ids) == 1

    def test_when_the_server_refuses_one_then_the_error_is_its_reply(self, client: Any) -> None:
        replies = run_commands(client, [INCREMENT, ("INCR",), INCREMENT])

        assert isinstance(replies[1], redis.ResponseError)
        assert (replies[0], replies[2]) == (1, 2)

    def test_when_it_restarts_between_two_round_trips_then_the_second_does_not_notice(
        self, client: Any, valkey: RedisServer
    ) -> None:
        run_commands(client, [INCREMENT])

        valkey.restart()

        assert run_commands(client, [("PING",)]) in ([b"PONG"], [True])

    def test_when_it_is_away_then_the_caller_hears_it_until_it_is_back(self, client: Any, valkey: RedisServer) -> None:
        run_commands(client, [INCREMENT])
        valkey.stop()

        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                run_commands(client, [INCREMENT])

        valkey.start()
        assert run_commands(client, [("PING",)]) in ([b"PONG"], [True])


class TestGivenAServerThatHangs:
    """It accepts connections, and never replies."""

    def test_when_round_trips_are_made_then_each_waits_for_one_connection(self, valkey: RedisServer) -> None:
        client = connect(valkey.url, timeout_s=0.1)
        run_commands(client, [INCREMENT])

        with hanging(valkey) as hung:
            for _ in range(3):
                with pytest.raises(redis.TimeoutError):
                    run_commands(client, [INCREMENT])

            assert num_connections(hung) == 3


class TestGivenAReplyThatIsLost:
    """The server has done what it was asked, and the connection breaks before the reply."""

    def test_when_commands_were_sent_then_none_is_sent_again_or_answered_late(self, valkey: RedisServer) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="sluice-") as folder,
            cutting_proxy(Path(folder) / "proxy.sock", valkey.socket_path, lambda data: b"INCR" in data) as proxy,
        ):
            client = connect(proxy.url, timeout_s=5)

            with pytest.raises(redis.ConnectionError):
                run_commands(client, [INCREMENT, ("GET", "other")])

            assert run_commands(client, [("GET", "n")]) == [b"1"]
