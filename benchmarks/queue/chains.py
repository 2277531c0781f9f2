"""What chains cost: looks at 10,000 blocked jobs, and releases. Needs no model."""

import argparse
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from benchmarks.tables import table
from sluice.producer import Producer
from sluice.protocol.chains.releasing import ChainLook, ChainWatch
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run_commands
from sluice.worker.connection.clients import Client, connect
from tests.producer.worker_side import HandWorker
from tests.servers import redis_server

NUM_JOBS = 10_000
NUM_LOOKS = 40


@dataclass(slots=True, eq=False)
class Watch:
    """A worker's look at chains, which counts its commands. Changes with each look."""

    client: Client
    _watch: ChainWatch = field(default_factory=lambda: ChainWatch(QueueKeys("default")))

    def look(self, ended: Collection[str] = ()) -> int:
        """Look once; return the number of commands."""
        steps, num_commands = self._watch.release(ChainLook(), ended), 0
        commands = next(steps, None)
        while commands is not None:
            num_commands += len(commands)
            try:
                commands = steps.send(run_commands(self.client, commands))
            except StopIteration:
                return num_commands
        return num_commands

    def measured(self, what: str, ended: Collection[str] = (), *, count: int = 1) -> tuple[object, ...]:
        """Return a row: the time of a look, the server's processor time, and its commands."""
        busy_s, begin_s = self._server_s(), time.perf_counter()
        num_commands = max(self.look(ended) for _ in range(count))
        taken_s = time.perf_counter() - begin_s
        server_ms = 1000 * (self._server_s() - busy_s) / count
        return what, f"{1000 * taken_s / count:.2f}", f"{server_ms:.2f}", num_commands

    def _server_s(self) -> float:
        info: dict[str, Any] = self.client.info("cpu")  # Any: redis-py's replies
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def main() -> None:
    """Measure on a server of its own."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with redis_server("valkey") as server, Producer(server.url) as producer, server.client() as plain:
        watch, worker = Watch(connect(server.url, timeout_s=60)), HandWorker(plain)
        rows = [watch.measured("a look, no chain", count=NUM_LOOKS)]
        parent = producer.submit("one")
        list(producer.submit_many(["job"] * NUM_JOBS, after=[parent]))
        rows.append(watch.measured(f"a look, {NUM_JOBS:,} jobs wait for one", count=NUM_LOOKS))
        worker.generate(worker.pull()[0])
        rows.append(watch.measured(f"to release {NUM_JOBS:,} jobs that wait for one", [parent.id]))
        plain.flushall()
        parents = [str(answer) for answer in producer.submit_many(["one"] * NUM_JOBS)]
        for name in parents:
            producer.submit("{{outputs[0]}}", after=[name])
        rows.append(watch.measured(f"a look, {NUM_JOBS:,} chains wait for {NUM_JOBS:,} jobs", count=NUM_LOOKS))
        worker = HandWorker(plain)
        [leased] = worker.pull(1)
        worker.generate(leased)
        rows.append(watch.measured("to release one chain", [leased.id]))
    print(table([("", "ms", "server's ms", "commands"), *rows]))
