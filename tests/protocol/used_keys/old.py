"""A queue of format 1 that is moved while jobs wait in the present format, among keys that other programs wrote."""

from collections.abc import Callable
from typing import Any

from sluice.protocol.calls import Call, migration
from sluice.protocol.keys import QueueKeys
from tests.migration.recorded import asked, end_workers, restore
from tests.protocol.driving import Queue
from tests.protocol.hostile.test_shared_keys import LAST_ID

KEYS = QueueKeys("default")


class OldQueue:
    """The recorded queue, on a server that was emptied."""

    def __init__(self, client: Any) -> None:  # Any: a redis-py client
        self.queue, self.client = Queue(client, KEYS), client
        client.flushall()
        restore(client)
        end_workers(client)
        # Another job of this name waits in format 1.
        self.queue.add("waiting0", "a")
        self.queue.add("new", "b")
        self.queue.configure(tokens_per_minute={"t": 10**9}, max_running={"t": 0, "a": 0})
        self._write_as_others()

    def _write_as_others(self) -> None:
        self.client.delete(KEYS.key("parked"))
        self.client.zadd(KEYS.key("heads", 0), {"nobody": 0})
        self.client.hset(KEYS.key("served"), ":0", 10**9)
        self.client.set(KEYS.lane(3, "a"), "foreign")
        for stream in (KEYS.outbox, self.key("outbox")):
            self.client.xadd(stream, {"x": "1"}, id=LAST_ID)
        self.client.hset(self.key("batch", "closed"), "done", 9)
        self.client.set(self.key("batch", "odd"), "foreign")

    def key(self, *parts: str) -> str:
        """A key of format 1."""
        return ":".join([KEYS.prefix_of_format_1, *parts])

    def run(self, *made: Call[Any]) -> None:  # Any: the replies are not looked at
        for call in made:
            self.queue.run(call)


def _close(old: OldQueue) -> None:
    old.client.hset(old.key("config"), "mode", "deadline")
    old.run(migration.close_format_1(KEYS, "moved"))


def _migrate_jobs(old: OldQueue) -> None:
    # One of two on its lane stays.
    old.run(migration.migrate_jobs(KEYS, [job_id for job_id in asked() if job_id != "0.a.waiting0"]))


def _finish(old: OldQueue) -> None:
    finish = migration.finish_format_1(KEYS, "moved", may_end=True)
    old.run(finish)
    kept = {old.key("counters"), old.key("config")}
    names = {key.decode() for key in old.client.keys(old.key("*"))}
    old.client.delete(*(name for name in names - kept if not name.startswith(KEYS.prefix)))
    old.run(finish)


MOVES: dict[str, Callable[[OldQueue], object]] = {
    "close_format_1": _close,
    "migrate_lanes": lambda old: old.run(*[migration.migrate_lanes(KEYS)] * 4),
    "migrate_jobs": _migrate_jobs,
    "migrate_batches": lambda old: old.run(migration.migrate_batches(KEYS, ["closed", "odd"])),
    "migrate_streams": lambda old: old.run(*[migration.migrate_streams(KEYS)] * 2),
    "finish_format_1": _finish,
}
"""The calls of each script that moves a queue."""
