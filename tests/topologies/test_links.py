"""A link that threads share, without a server: one pool per node, and each connection returns to its own pool."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from sluice.producer.errors import QueueUnreachable
from sluice.producer.operations.operation import Ask
from sluice.producer.transport import links
from sluice.producer.transport.links import Link
from sluice.producer.transport.retries import LinkSettings
from sluice.protocol.redis.execution import Command, Reply
from sluice.protocol.redis.routing import CLUSTER_SLOTS

NUM_THREADS = 4


class FakeConnection:
    """A node of a Cluster with one shard."""

    def __init__(self, pool: "FakePool") -> None:
        self._pool = pool

    def send_commands(self, commands: Sequence[Command]) -> None:
        self._commands = list(commands)

    def read_replies(self, num_replies: int) -> list[Reply]:
        assert num_replies == len(self._commands)
        return [[[0, 16383, [b"a", 1]]] if command == CLUSTER_SLOTS else b"PONG" for command in self._commands]

    def release(self) -> None:
        self._pool.in_use.remove(self)


class FakePool:
    """A pool that is slow to make, so that threads that race for it overlap."""

    def __init__(self, url: str) -> None:
        time.sleep(0.05)
        self.url = url
        self.in_use: set[FakeConnection] = set()
        self.is_open = True

    def get_connection(self) -> FakeConnection:
        connection = FakeConnection(self)
        self.in_use.add(connection)
        return connection

    def disconnect(self) -> None:
        self.is_open = False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakePool]:
    """The pools that links make."""
    pools: list[FakePool] = []

    def make(url: str) -> FakePool:
        pool = FakePool(url)
        pools.append(pool)
        return pool

    monkeypatch.setattr(links, "make_pool", make)
    return pools


class TestGivenThreadsThatShareALink:
    def test_when_they_ask_one_node_at_once_then_it_has_one_pool_which_close_disconnects(
        self, made: list[FakePool]
    ) -> None:
        link, together = Link(LinkSettings("redis+cluster://a:1")), threading.Barrier(NUM_THREADS)

        def ask(_: int) -> list[Reply]:
            together.wait()
            return link.ask(Ask((("PING",),)))

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            replies = list(threads.map(ask, range(NUM_THREADS)))
        link.close()

        assert replies == [[b"PONG"]] * NUM_THREADS
        assert [(pool.url, pool.in_use, pool.is_open) for pool in made] == [("redis://a:1/0", set(), False)]


class TestGivenAClusterThatCannotBeReached:
    @pytest.mark.parametrize("command", [("PING",), ("SCAN", 0)], ids=["any", "scan"])
    def test_when_it_is_asked_then_it_is_unreachable(self, command: Command) -> None:
        link = Link(LinkSettings("redis+cluster://127.0.0.1:1"))

        with pytest.raises(QueueUnreachable, match="does not answer"):
            link.ask(Ask((command,)))
