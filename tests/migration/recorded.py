"""The recorded queue of format 1, and a picture of a queue that two runs can be compared by."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgpack as untyped_msgpack  # pyright: ignore[reportMissingTypeStubs] (it ships none)

from sluice.protocol.keys import QueueKeys
from sluice.protocol.wire import JobId, JobOptions
from tests.integration.jobs import Ask
from tests.protocol.driving import CLASSES, Queue

msgpack: Any = untyped_msgpack
KEYS = QueueKeys("default")
OLD = KEYS.prefix_of_format_1
FILE = Path(__file__).parent / "format_1.msgpack"

OF_PLACES = {"entry", "number", "before", "ended"}
"""Fields of a row that depend on when it was moved; a stopped job ends with its move."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A job of the recorded queue."""

    id: JobId
    ask: Ask
    becomes: str
    """What it was made to be: `waiting`, `done`, …"""

    priority: int
    key: str | None
    batch: str | None


@cache
def _about() -> dict[str, Any]:
    return msgpack.unpackb(FILE.read_bytes())


def recorded_ms() -> int:
    """The server's time at the end of the recording."""
    return _about()["recorded_ms"]


def asked() -> dict[JobId, Asked]:
    """All jobs, in the order of their submits."""
    return {JobId(job["id"]): _asked(job) for job in _about()["jobs"]}


def _asked(job: dict[str, Any]) -> Asked:
    options = JobOptions(max_tokens=job["max_tokens"], n=job["n"])
    ask = Ask(prompt=job["prompt"], options=options, seed=job["seed"], tenant=job["tenant"])
    return Asked(JobId(job["id"]), ask, job["becomes"], job["class"], job["key"], job["batch"])


def restore(client: Any, queue: str = "default") -> None:  # Any: a redis-py client
    """Write the recorded keys to an empty server."""
    prefix = QueueKeys(queue).prefix_of_format_1.encode()
    for recorded, ttl_ms, *commands in _about()["keys"]:
        key = recorded.replace(OLD.encode(), prefix)
        for name, _, *values in commands:
            client.execute_command(name, key, *values)
        if ttl_ms:
            client.pexpire(key, ttl_ms)


def end_workers(client: Any, queue: str = "default") -> None:  # Any: as above
    """Let the recorded worker that still lived be dead, as its parent process would report it."""
    client.hset(f"{QueueKeys(queue).prefix_of_format_1}:worker:living", "reported", "1")


def names_of_format_1(client: Any) -> set[str]:  # Any: as above
    """Names of its keys, without those that only tell its clients something, and expire."""
    names = {key.decode()[len(OLD) + 1 :] for key in client.scan_iter(f"{OLD}:*")}
    return {name for name in names if not name.startswith(("2:", "idem:")) and not _is_trace(client, name)}


def _is_trace(client: Any, name: str) -> bool:
    return name.startswith("job:") and set(client.hkeys(f"{OLD}:{name}")) == {b"digest", b"state"}


def picture(client: Any) -> dict[str, Any]:  # Any: texts, lists and maps
    """What a queue holds, without what depends on the time of the moves."""
    queue = Queue(client, KEYS)
    rows = {name.removeprefix("job:"): queue.fields(*name.split(":")[1:]) for name in queue.names("job:*")}
    lanes = {name: [fields[b"job"] for _, fields in queue.entries(KEYS.key(name))] for name in queue.names("lane:*")}
    # Jobs of dead workers are found in any order; likewise the events of what became of them.
    lanes = {name: sorted(jobs) if "returned" in name else jobs for name, jobs in lanes.items()}
    counters = {name: value for name, value in queue.hash_of("counters").items() if name != "outbox_bytes"}
    kept = ("payload", "result", "channel", "idem", "batch", "members")
    return {
        "rows": {name: {k: v for k, v in row.items() if k not in OF_PLACES} for name, row in rows.items()},
        "lanes": lanes,
        "kept": {name for name in queue.names() if name.startswith(kept)},
        "sets": {name: client.zrange(KEYS.key(name), 0, -1) for name in ("timers", "delayed", "suspects", "dead")},
        "batches": {name: queue.hash_of(*name.split(":")) for name in queue.names("batch:*")},
        "counters": counters,
        "settings": {k: v for k, v in queue.hash_of("config").items() if k not in ("stamp", "test_clock_ms")},
        "heads": [queue.names(f"heads:{one}") for one in CLASSES],
        "events": sorted((event.kind, event.job_id, event.version) for event in queue.events()),
        "callbacks": [fields for _, fields in queue.entries(KEYS.callbacks)],
    }
