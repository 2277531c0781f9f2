"""Check the drained queue itself: counters agree, and no key is left over."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from tests.chaos.checker.evidence import Asked
from tests.chaos.checker.formats import ENDS

Finding = tuple[str, str]

FOR_EVER = frozenset(
    {
        "clock", "config", "counters", "weights", "limits", "buckets", "served", "tenants", "models", "offers",
        "parents", "bell", "outbox", "callbacks", "dead", "garbage",
    }
)  # fmt: skip
"""Keys that do not expire; their size is bounded."""

KEPT = frozenset({"job", "payload", "result", "channel", "idem", "batch", "worker", "serving", "storages"})
"""Keys that expire."""

WORKER_KEPT_MS = 3_600_000


def check_counters(client: Any, prefix: str, ended: Counter[str]) -> Iterator[Finding]:  # Any: a redis-py client
    """Every submitted job has ended; the totals equal those of the jobs."""
    found = {name.decode(): int(value) for name, value in client.hgetall(f"{prefix}:counters").items()}
    name = f"{prefix}:counters"
    for total in ("waiting_jobs", "waiting_tokens", "waiting_bytes", "running_jobs"):
        if found.get(total, 0) != 0:
            yield name, f"counters: {total} is {found[total]} in a drained queue"
    if found.get("submitted", 0) != sum(found.get(state, 0) for state in ENDS):
        yield name, f"counters: {found.get('submitted', 0)} submitted, {sum(found.get(s, 0) for s in ENDS)} ended"
    for state in ENDS:
        if found.get(state, 0) != ended[state]:
            yield name, f"counters: {found.get(state, 0)} {state}, and {ended[state]} jobs are"


def check_batches(client: Any, prefix: str, states: Iterable[tuple[Asked, str]]) -> Iterator[Finding]:
    """Each batch counts its jobs."""
    totals: dict[str, Counter[str]] = {}
    for asked, state in states:
        if asked.batch:
            totals.setdefault(asked.batch, Counter())[state] += 1
    for batch, counted in totals.items():
        key = f"{prefix}:batch:{batch}"
        found = {name.decode(): value.decode() for name, value in client.hgetall(key).items()}
        for name, number in {"total": counted.total(), **{state: counted[state] for state in ENDS}}.items():
            if int(found.get(name) or 0) != number:
                yield batch, f"batch: it counts {found.get(name, 0)} {name} and has {number}"


def check_residue(client: Any, prefix: str) -> Iterator[Finding]:
    """No key is left that should be deleted, and none without expiry that should have one."""
    for batch in _in_batches(client.scan_iter(match=f"{prefix}:*", count=2000)):
        pipe = client.pipeline(transaction=False)
        for key in batch:
            pipe.pttl(key)
        for key, kept_ms in zip(batch, pipe.execute(), strict=True):
            yield from _check_key(key.decode(), key.decode()[len(prefix) + 1 :].partition(":")[0], kept_ms)
    yield from check_drained(client, f"{prefix}:outbox")
    if length := client.xlen(f"{prefix}:garbage"):
        yield f"{prefix}:garbage", f"residue: it has {length} entries"


def _in_batches(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for key in keys:
        batch.append(key)
        if len(batch) == 1000:
            yield batch
            batch = []
    yield batch


def _check_key(key: str, kind: str, kept_ms: int) -> Iterator[Finding]:
    if kept_ms == -2 or kind in FOR_EVER:
        return
    if kind not in KEPT:
        yield key, "residue: it should be gone from a drained queue"
    elif kept_ms == -1:
        yield key, "residue: it would stay for ever"
    elif kind == "worker" and kept_ms > WORKER_KEPT_MS:
        yield key, f"residue: it is kept for {kept_ms} ms"


def check_drained(client: Any, key: str) -> Iterator[Finding]:
    """A stream that its group has read to the end: no entry is left or pending."""
    if length := client.xlen(key):
        yield key, f"residue: it has {length} entries"
    for group in client.xinfo_groups(key) if client.exists(key) else ():
        if group["pending"]:
            yield key, f"residue: {group['name'].decode()} owes {group['pending']} acknowledgements"
