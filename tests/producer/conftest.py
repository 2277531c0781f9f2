"""A client and a worker moved by hand, on a real server."""

from collections.abc import Iterator
from typing import Any

import pytest

from producer import Producer
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer


@pytest.fixture
def producer(valkey: RedisServer) -> Iterator[Producer]:
    """A client of the queue `default`."""
    with Producer(valkey.url) as client:
        yield client


@pytest.fixture
def redis_client(valkey: RedisServer) -> Iterator[Any]:
    """A plain connection to the same server."""
    with valkey.client() as client:
        yield client


@pytest.fixture
def worker(redis_client: Any) -> HandWorker:
    """The worker's side of the queue `default`."""
    return HandWorker(redis_client)
