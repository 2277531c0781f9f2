"""A real Redis Cluster for tests: a process for each shard, on loopback."""

import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.crc import key_slot

from sluice.protocol.keys import QueueKeys
from tests.servers import START_TIMEOUT_S, Flavor, RedisServer, free_port, redis_server

NUM_SLOTS = 16384


@dataclass(frozen=True, slots=True)
class Cluster:
    """Shards, each with an equal range of slots."""

    servers: list[RedisServer]

    @property
    def url(self) -> str:
        """Two of its nodes: the client finds the rest."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers[:2])

    def shard_of(self, keys: QueueKeys) -> RedisServer:
        """Return the shard that holds a partition."""
        slot = key_slot(keys.notifications.encode())
        return self.servers[slot * len(self.servers) // NUM_SLOTS]

    def queue_over_all(self, partitions: int, *, skip: int = 0) -> str:
        """A queue's name whose partitions lie on as many shards; the first after so many names."""
        for number in range(skip, skip + 10_000):
            name = f"q{number}"
            if len({self.shard_of(QueueKeys(name, p)).port for p in range(partitions)}) == partitions:
                return name
        raise AssertionError("no such name")


def _config(name: str) -> tuple[str, ...]:
    # The other shards keep serving when one is down.
    return ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no",
            "--cluster-config-file", name, "--cluster-port", str(free_port()))  # fmt: skip


@contextmanager
def redis_cluster(flavor: Flavor, num_shards: int = 3) -> Generator[Cluster]:
    """A running cluster, each shard with an append-only file."""
    with ExitStack() as stack:
        servers: list[RedisServer] = []
        for _ in range(num_shards):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-")))
            server = RedisServer(flavor, folder, is_durable=True, port=free_port(), extra=_config("nodes.conf"))
            server.start()
            stack.callback(server.kill)
            servers.append(server)
        cluster = Cluster(servers)
        _join(cluster)
        yield cluster


@contextmanager
def replica_of(primary: RedisServer) -> Generator[RedisServer]:
    """A replica of a cluster's shard, in sync."""
    with redis_server(primary.flavor, with_tcp=True, extra=_config("nodes.conf")) as server, server.client() as client:
        with primary.client() as first:
            primary_id = first.execute_command("CLUSTER", "MYID")
        _meet(primary, client)
        _wait_until(lambda: primary_id in client.execute_command("CLUSTER", "NODES"), "they did not meet")
        client.execute_command("CLUSTER", "REPLICATE", primary_id)
        _wait_until(lambda: client.info("replication").get("master_link_status") == "up", "the replica does not follow")
        yield server


def _meet(first: RedisServer, client: Any) -> None:  # Any: a redis-py client
    bus = first.extra[first.extra.index("--cluster-port") + 1]
    client.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port, bus)


def _wait_until(is_so: Callable[[], bool], problem: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s, problem
        time.sleep(0.02)


def _join(cluster: Cluster) -> None:
    first = cluster.servers[0]
    for number, server in enumerate(cluster.servers):
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", *_range(number, len(cluster.servers)))
            if server is not first:
                _meet(first, client)
    wait_until_joined(cluster)


def wait_until_joined(cluster: Cluster) -> None:
    """Wait until every shard knows every other, and serves."""
    num_shards = len(cluster.servers)
    _wait_until(lambda: all(_is_ready(server, num_shards) for server in cluster.servers), "the cluster did not form")


def _range(number: int, count: int) -> tuple[int, int]:
    # The first slot of a range is the first that `Cluster.shard_of` gives it.
    return -(-number * NUM_SLOTS // count), -(-(number + 1) * NUM_SLOTS // count) - 1


def _is_ready(server: RedisServer, count: int) -> bool:
    with server.client() as client:
        info: Any = client.execute_command("CLUSTER", "INFO")
        slots: Any = client.execute_command("CLUSTER", "SLOTS")
    text = info.decode() if isinstance(info, bytes) else str(info)
    return "cluster_state:ok" in text and len(slots) == count
