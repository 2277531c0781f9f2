"""A primary with a replica that can be cut off or stopped, and a Sentinel over both: real processes on loopback."""

import signal
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import wait_until
from tests.servers import Flavor, RedisServer, binary_of, free_port, how_to_get, redis_server

SERVICE = "queue"
FOLLOWER, PASSWORD = "follower", "follow"
PATIENCE_S = 60.0


def replication_of(server: RedisServer) -> Any:  # Any: INFO is untyped
    """Return a server's replication INFO."""
    with server.client() as client:
        return client.info("replication")


@dataclass(frozen=True, slots=True)
class Replicated:
    """A primary and a replica."""

    primary: RedisServer
    replica: RedisServer

    def wait_until_followed(self) -> None:
        """Wait until the replica is in sync."""
        wait_until(
            lambda: replication_of(self.replica)["master_link_status"] == "up",
            "the replica follows",
            patience_s=PATIENCE_S,
        )
        wait_until(
            lambda: "online" in str(replication_of(self.primary).get("slave0")),
            "the primary knows it",
            patience_s=PATIENCE_S,
        )
        # Redis 7.0 sends writes only after the replica's first acknowledgement, seconds after the link is up.
        with self.primary.client() as client:
            client.publish("any", "")
            wait_until(lambda: client.wait(1, 100), "a write reaches the replica", patience_s=PATIENCE_S)

    def cut_off(self) -> None:
        """Disconnect the replica: delete the user that it connects as, which closes its connection."""
        with self.primary.client() as client:
            client.execute_command("ACL", "DELUSER", FOLLOWER)

    def stop_replica(self) -> None:
        """Stop the replica's process; its connection stays open."""
        assert self.replica.process is not None
        self.replica.process.send_signal(signal.SIGSTOP)

    def resume_replica(self) -> None:
        """Continue the replica's process."""
        assert self.replica.process is not None
        self.replica.process.send_signal(signal.SIGCONT)

    def fail_over_by_hand(self) -> None:
        """Kill the primary, and promote the replica."""
        self.primary.kill()
        with self.replica.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")


@contextmanager
def replicated(flavor: Flavor = "valkey") -> Generator[Replicated]:
    """A primary and its replica, in sync."""
    if binary_of(flavor) is None:
        pytest.skip(how_to_get(flavor))
    with ExitStack() as stack:
        at_once = ("--repl-diskless-sync-delay", "0")
        primary = stack.enter_context(redis_server(flavor, with_tcp=True, extra=at_once))
        with primary.client() as client:
            client.execute_command(
                "ACL", "SETUSER", FOLLOWER, "on", f">{PASSWORD}", "+psync", "+replconf", "+ping", "+sync"
            )
        follow = ("--replicaof", "127.0.0.1", str(primary.port), "--masteruser", FOLLOWER, "--masterauth", PASSWORD)
        replica = stack.enter_context(redis_server(flavor, with_tcp=True, extra=(*at_once, *follow)))
        pair = Replicated(primary, replica)
        pair.wait_until_followed()
        yield pair


@dataclass(frozen=True, slots=True)
class Watched:
    """A primary, its replica, and the Sentinel that watches them."""

    pair: Replicated
    sentinel_port: int

    @property
    def url(self) -> str:
        """The URL with which clients ask the Sentinel for the primary."""
        return f"redis+sentinel://127.0.0.1:{self.sentinel_port}/{SERVICE}/0"

    def wait_until_promoted(self) -> None:
        """Wait until the replica is the primary."""
        wait_until(
            lambda: replication_of(self.pair.replica)["role"] == "master",
            "the replica is promoted",
            patience_s=PATIENCE_S,
        )


@contextmanager
def watched(flavor: Flavor = "valkey", *, down_after_ms: int = 500) -> Generator[Watched]:
    """A primary and its replica under a Sentinel, which fails over once the primary has been silent for so long."""
    with replicated(flavor) as pair, tempfile.TemporaryDirectory(prefix="sluice-") as name:
        settings, port = Path(name) / "sentinel.conf", free_port()
        lines = [
            f"port {port}", "bind 127.0.0.1", f"dir {name}", f"logfile {name}/sentinel.log",
            f"sentinel monitor {SERVICE} 127.0.0.1 {pair.primary.port} 1",
            f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}", f"sentinel failover-timeout {SERVICE} 2000",
        ]  # fmt: skip
        settings.write_text("\n".join(lines) + "\n")
        with subprocess.Popen([str(binary_of(flavor)), str(settings), "--sentinel"]) as sentinel:
            try:
                found = Watched(pair, port)
                _wait_until_known(settings, pair)
                yield found
            finally:
                sentinel.kill()


def _wait_until_known(settings: Path, pair: Replicated) -> None:
    # A Sentinel writes what it has found to its configuration file.
    known = f"known-replica {SERVICE} 127.0.0.1 {pair.replica.port}"
    wait_until(lambda: known in settings.read_text(), "the Sentinel knows the replica", patience_s=PATIENCE_S)
