"""A queue on each supported server, whose clock stands still until a test moves it."""

from collections.abc import Iterator

import pytest

from tests.protocol.driving import Queue
from tests.servers import RedisServer


@pytest.fixture
def queue(any_redis: RedisServer) -> Iterator[Queue]:
    with any_redis.client() as client:
        queue = Queue(client)
        queue.stop_clock()
        yield queue


@pytest.fixture
def one_queue(valkey: RedisServer) -> Iterator[Queue]:
    """On Valkey alone, for what does not depend on the server."""
    with valkey.client() as client:
        queue = Queue(client)
        queue.stop_clock()
        yield queue
