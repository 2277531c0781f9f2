"""Tell the producers of a queue that a worker loads its model: until its first heartbeat they see no worker."""

import socket
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

from redis.exceptions import RedisError

from sluice.protocol.keys import QueueKeys
from sluice.protocol.limits import STARTING, STARTING_LIFE_MS
from sluice.worker.connection.clients import Client

EVERY_S = STARTING_LIFE_MS / 3000


@contextmanager
def announced(client: Client, partitions: Sequence[QueueKeys]) -> Generator[None]:
    """Write the field `starting` of each partition while the block runs. An outage of Redis is ignored."""
    is_over = threading.Event()
    thread = threading.Thread(target=_announce, args=(client, partitions, is_over), name="announcement", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _announce(client: Client, partitions: Sequence[QueueKeys], is_over: threading.Event) -> None:
    while True:
        for keys in partitions:
            # Only a notice is lost. The next call to Redis reports the outage, and the next round announces again. The
            # shards of the other partitions may be there.
            with suppress(RedisError, OSError):
                client.hset(keys.key("config"), STARTING, f"{_server_ms(client)} {socket.gethostname()}")
        if is_over.wait(EVERY_S):
            break
    for keys in partitions:
        # What stays because of an outage ends after its life.
        with suppress(RedisError, OSError):
            client.hdel(keys.key("config"), STARTING)


def _server_ms(client: Client) -> int:
    seconds, microseconds = client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000
