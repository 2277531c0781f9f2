"""Steps of tests of a batch's task: run by hand, one after the other."""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sluice.gateway.batches.batch import StoredBatch
from sluice.gateway.batches.taken import Workshop
from sluice.gateway.batches.task import advance
from sluice.gateway.files.store import INPUT, File, Stored, new_file_id
from sluice.gateway.tables.pages import new_name
from sluice.producer.client import Producer
from sluice.protocol.clock import wall_ms
from tests.gateway.batches.processes import ENDPOINT

DAY_MS = 86_400_000
Lines = list[dict[str, Any]]  # Any: JSON


def added(workshop: Workshop, content: bytes, **fields: Any) -> StoredBatch:  # Any: a batch's fields
    """Upload a file and create its batch, as the gateway does."""
    created_ms = wall_ms()
    file_id = new_file_id(created_ms)
    key = f"files/{file_id.removeprefix('file-')}"
    workshop.storage.put(key, content)
    objects = (Stored(key=key, num_bytes=len(content)),)
    tenant = fields.get("tenant", "acme")
    file = File(id=file_id, tenant=tenant, purpose=INPUT, filename="in", objects=objects, created_ms=created_ms)
    workshop.files.add(file)
    known: dict[str, Any] = {
        "id": f"batch_{new_name(created_ms)}", "tenant": "acme", "queue": "default", "partitions": 1,
        "endpoint": ENDPOINT, "model": "null", "input_file": file_id, "window": "24h", "created_ms": created_ms,
        "expires_ms": created_ms + DAY_MS,
    }  # fmt: skip
    batch = StoredBatch(**known | fields)
    assert workshop.batches.add(batch)
    return batch


def current(workshop: Workshop, batch: StoredBatch) -> StoredBatch:
    """The batch as the database has it."""
    found = workshop.batches.get(batch.id, "acme")
    assert found is not None
    return found


def go_on(workshop: Workshop, batch: StoredBatch) -> StoredBatch:
    """Run one task of a batch, as if it were due."""
    found = current(workshop, batch)
    workshop.batches.release(found, 0)
    advance(workshop, batch.id, found.epoch)
    return current(workshop, batch)


def until(workshop: Workshop, batch: StoredBatch, is_right: Callable[[StoredBatch], bool]) -> StoredBatch:
    """Run tasks until a batch is as expected."""
    deadline_s = time.monotonic() + 20
    while not is_right(found := go_on(workshop, batch)):
        assert time.monotonic() < deadline_s, found
    return found


def let_window_pass(workshop: Workshop, producer: Producer, batch: StoredBatch) -> None:
    """Let the deadline of a batch pass, for its tasks and for the queue."""
    producer.expire_batch(batch.id, timedelta(0))
    workshop.batches.change(current(workshop, batch), expires_ms=wall_ms())


def lines_of(workshop: Workshop, file_id: str | None) -> Lines:
    """The lines of a file; none without one."""
    if file_id is None:
        return []
    file = workshop.files.get(file_id, "acme")
    assert file is not None
    content = b"".join(workshop.storage.get(part.key) for part in file.objects)
    assert len(content) == file.num_bytes
    return [json.loads(line) for line in content.splitlines()]


def custom_ids(lines: Lines) -> list[str]:
    """The custom ids of lines, sorted."""
    return sorted(line["custom_id"] for line in lines)


def names(*numbers: int) -> list[str]:
    """The custom ids of numbered lines, sorted."""
    return sorted(f"c-{number}" for number in numbers)
