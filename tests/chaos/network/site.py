"""What runs on the hosts: a primary, a replica, three Sentinels, PostgreSQL, three workers, a gateway, producers."""

import os
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.history.database import open_database
from sluice.producer.client import Producer
from sluice.protocol.calls import QueueSettings
from sluice.worker.recorder.migrate import migrate
from tests.chaos.faults.replicated import SERVICE
from tests.chaos.network.clocks import Clocks
from tests.chaos.network.hosts import Direction, Host, Network, network
from tests.end_to_end.processes import WorkerProcess
from tests.forks import ROOT
from tests.gateway.gateway_process import new_key
from tests.integration.jobs import KEYS, wait_until
from tests.postgres import postgres_server
from tests.servers import RedisServer, binary_of

WORKERS = ("worker-1", "worker-2", "worker-3")
SENTINELS = ("sentinel-1", "sentinel-2", "sentinel-3")
SERVERS = ("redis-1", "redis-2")
HOSTS = ("producer", "gateway", *WORKERS, *SERVERS, *SENTINELS, "postgres")
ROLES = ("producer", "gateway", *WORKERS, "primary", "replica", *SENTINELS, "postgres")
"""Hosts, where the servers are named by what they are now."""

REDIS_PORT, SENTINEL_PORT, POSTGRES_PORT, GATEWAY_PORT = 6379, 26379, 5432, 8000
DOWN_AFTER_MS, FAILOVER_TIMEOUT_MS = 2000, 6000
DURABILITY = "replica:1"
"""Default of the queue, which the gateway asks for."""

MAX_WAITING_JOBS = 100
"""Reached soon: the workers have work when no producer reaches the queue."""

CHANNEL_KEPT_MS = 4 * 3_600_000
"""Longer than a run, so that the checker finds every channel."""

WELL_S = 120.0
"""Longest wait for a site to be well once a fault is over."""

LOOK_S = 0.1
LOOKS_AT_LAG = 5

WORKER = {
    "MODEL": "null?step_s=0.03", "TOOL_FORMAT": "hermes", "MAX_NUM_SEQS": "4", "METRICS": "false",
    "LOG_FORMAT": "json", "BEAT_EVERY_S": "1", "BEAT_LIFE_S": "4", "RECORDER": "true", "DRAIN": "hand-over",
}  # fmt: skip
"""Settings of a worker, slow enough that jobs wait. The heartbeat and the time-outs are the defaults."""


def takes_for_up(sentinel: Any) -> bool:  # Any: redis-py's commands are partly untyped
    """Whether a Sentinel takes the primary for up: it may replace one that it does not after the end of the fault."""
    return sentinel.sentinel_master(SERVICE)["flags"] == "master"


@dataclass(slots=True, eq=False)
class Site:
    """All hosts with their processes. Mutable: servers change roles."""

    network: Network
    clocks: Clocks
    folder: Path
    stack: ExitStack
    redis: dict[str, RedisServer] = field(default_factory=dict[str, RedisServer])
    workers: dict[str, WorkerProcess] = field(default_factory=dict[str, WorkerProcess])
    producers: list["subprocess.Popen[bytes]"] = field(default_factory=list["subprocess.Popen[bytes]"])
    database_url: str = ""
    """Over the network."""

    local_database_url: str = ""
    """From outside, over a socket in the file system."""

    api_key: str = ""
    """Of the gateway."""

    # ------------------------------------------------------------ places

    def host(self, role: str) -> Host:
        """A host by its name, or by what its server is now."""
        if role in ("primary", "replica"):
            return self.network.hosts[self.primary_name if role == "primary" else self.replica_name]
        return self.network.hosts[role]

    def directions(self, ones: Sequence[str], others: Sequence[str]) -> list[Direction]:
        """Packets from each of these roles to each of those."""
        return [(self.host(one), self.host(other)) for one in ones for other in others]

    @property
    def redis_url(self) -> str:
        """The URL by which clients find the primary."""
        addresses = ",".join(f"{self.network.hosts[name].address}:{SENTINEL_PORT}" for name in SENTINELS)
        return f"redis+sentinel://{addresses}/{SERVICE}/0"

    @property
    def gateway_url(self) -> str:
        """Of the HTTP server."""
        return f"http://{self.network.hosts['gateway'].address}:{GATEWAY_PORT}"

    @property
    def primary_name(self) -> str:
        """The host of the server that is the primary for most Sentinels."""
        addresses = [self._primary_of(name) for name in SENTINELS]
        address = max(addresses, key=addresses.count)
        return next(name for name in SERVERS if self.network.hosts[name].address == address)

    @property
    def replica_name(self) -> str:
        """The host of the other server."""
        return next(name for name in SERVERS if name != self.primary_name)

    def _primary_of(self, sentinel: str) -> str:
        found: list[bytes] = self._sentinel(sentinel).execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return found[0].decode()

    def _sentinel(self, name: str) -> Any:  # Any: redis-py's commands are partly untyped
        return RedisServer("redis-7.0", self.folder / name).client()

    def primary_client(self) -> Any:  # Any: as above
        """A client of the primary from outside, by a socket in the file system."""
        return self.redis[self.primary_name].client()

    # ------------------------------------------------------------ health

    def wait_until_well(self) -> float:
        """Wait until all agree, the replica has all, and each worker beats; return how many seconds it took."""
        began_s = time.monotonic()
        while (trouble := self.trouble() or self._lag()) and time.monotonic() < began_s + WELL_S:
            time.sleep(LOOK_S)
        assert not trouble, f"after {WELL_S:g} s {trouble}"
        return time.monotonic() - began_s

    def trouble(self) -> str:
        """What is not well; nothing if all is."""
        if len({self._primary_of(name) for name in SENTINELS}) > 1:
            return "the Sentinels disagree"
        if in_doubt := [name for name in SENTINELS if not takes_for_up(self._sentinel(name))]:
            return f"the primary is in doubt for {', '.join(in_doubt)}"
        with self.redis[self.primary_name].client() as primary, self.redis[self.replica_name].client() as replica:
            first, second = primary.info("replication"), replica.info("replication")
            if first["role"] != "master" or "online" not in str(first.get("slave0")):
                return f"the primary is {first}"
            if second["role"] != "slave" or second["master_link_status"] != "up":
                return f"the replica is {second}"
            num_alive = primary.zcard(KEYS.key("alive"))
        return "" if num_alive == len(self.workers) else f"{num_alive} workers beat"

    def _lag(self) -> str:
        """What the replica still lacks of what the primary has now; nothing if it gets all soon."""
        with self.redis[self.primary_name].client() as primary, self.redis[self.replica_name].client() as replica:
            offset = primary.info("replication")["master_repl_offset"]
            for _ in range(LOOKS_AT_LAG):
                time.sleep(LOOK_S)
                if replica.info("replication").get("slave_repl_offset", 0) >= offset:
                    return ""
        return "the replica is behind"

    # ------------------------------------------------------------ starts

    def start(self) -> None:
        """Start all but the producers."""
        self._start_redis()
        self._start_sentinels()
        self._start_postgres()
        with self.host("producer").namespace.inside(), Producer(self.redis_url) as producer:
            producer.configure(
                QueueSettings(max_waiting_jobs=MAX_WAITING_JOBS, channel_ttl_ms=CHANNEL_KEPT_MS, durability=DURABILITY)
            )
        self._start_workers()
        self._start_gateway()
        self.wait_until_well()

    def _start_redis(self) -> None:
        for name in SERVERS:
            host = self.network.hosts[name]
            folder = self.folder / name
            folder.mkdir()
            follow = () if name == SERVERS[0] else ("--replicaof", self.network.hosts[SERVERS[0]].address, "6379")
            extra = ("--bind", host.address, "--protected-mode", "no", "--repl-diskless-sync-delay", "0", *follow)
            environ = self.clocks.environ(name)
            server = RedisServer("redis-7.0", folder, is_durable=True, port=REDIS_PORT, extra=extra, environ=environ)
            self.redis[name] = server
            self.start_redis(name)
            self.stack.callback(server.kill)

    def start_redis(self, name: str) -> None:
        """Start a server. One that returns is what its command line says, until a Sentinel tells it whom to follow."""
        with self.network.hosts[name].namespace.inside():
            self.redis[name].start()

    def _start_sentinels(self) -> None:
        primary = self.network.hosts[SERVERS[0]].address
        for name in SENTINELS:
            folder = self.folder / name
            folder.mkdir()
            lines = [
                f"port {SENTINEL_PORT}", f"bind {self.network.hosts[name].address}", "protected-mode no",
                f"dir {folder}", f"logfile {folder}/sentinel.log", f"unixsocket {folder}/redis.sock",
                f"sentinel monitor {SERVICE} {primary} {REDIS_PORT} 2",
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
                f"sentinel failover-timeout {SERVICE} {FAILOVER_TIMEOUT_MS}",
            ]  # fmt: skip
            (folder / "sentinel.conf").write_text("\n".join(lines) + "\n")
            self._popen(name, [str(binary_of("redis-7.0")), str(folder / "sentinel.conf"), "--sentinel"])
        for name in SENTINELS:
            wait_until(lambda name=name: self._knows_all(name), f"{name} knows all")

    def _knows_all(self, name: str) -> bool:
        if not (self.folder / name / "redis.sock").exists():
            return False
        known = self._sentinel(name).execute_command("INFO", "sentinel")["master0"]
        return (known["slaves"], known["sentinels"]) == (1, len(SENTINELS))

    def _start_postgres(self) -> None:
        host = self.network.hosts["postgres"]
        server = self.stack.enter_context(postgres_server())
        name = server.create_database()
        self.local_database_url = server.url(name).replace("postgresql://", "postgresql+psycopg://")
        server.kill()
        with host.namespace.inside():
            server.start_at(host.address, POSTGRES_PORT, self.clocks.environ("postgres"))
        self.database_url = f"postgresql+psycopg://postgres@{host.address}:{POSTGRES_PORT}/{name}"
        engine = open_database(self.local_database_url, is_writer=True)
        migrate(engine)
        engine.dispose()

    def _start_workers(self) -> None:
        own = {f"SLUICE_{name}": value for name, value in WORKER.items()}
        for name in WORKERS:
            with self.network.hosts[name].namespace.inside():
                worker = WorkerProcess(
                    self.redis_url, self.folder / f"{name}.log", **own, **self.clocks.environ(name),
                    SLUICE_DATABASE_URL=self.database_url, SLUICE_NAME=name,
                )  # fmt: skip
            self.stack.callback(worker.kill)
            self.workers[name] = worker
        for worker in self.workers.values():
            worker.wait_until_started()

    def _start_gateway(self) -> None:
        self.api_key = new_key(self.local_database_url, "default")
        address = self.network.hosts["gateway"].address
        environ = {"SLUICE_REDIS_URL": self.redis_url, "SLUICE_DATABASE_URL": self.database_url}
        command = ("sluice.producer", "serve", "--host", address, "--port", str(GATEWAY_PORT))
        self.run_module("gateway", command, environ)
        log = self.folder / "gateway.log"
        wait_until(lambda: "gateway started" in log.read_text(), f"the gateway starts: {log}")

    def run_module(
        self, host: str, command: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Run `python -m <command>` on a host."""
        return self._popen(host, [sys.executable, "-P", "-m", *command], environ or {})

    def _popen(
        self, host: str, command: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
        own |= {"OMP_NUM_THREADS": "1", **self.clocks.environ(host), **(environ or {})}
        with (self.folder / f"{host}.log").open("ab") as log, self.network.hosts[host].namespace.inside():
            process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=log, stderr=log)
        self.stack.callback(_end, process)
        return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


@contextmanager
def site(folder: Path) -> Generator[Site]:
    """All hosts, with all but the producers running. The folder, of a short path, keeps logs and data."""
    folder.chmod(0o755)
    with network(HOSTS) as joined, ExitStack() as stack:
        made = Site(joined, Clocks(folder), folder, stack)
        made.start()
        yield made
