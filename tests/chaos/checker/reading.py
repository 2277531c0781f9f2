"""Reads jobs from the server, many in one round trip."""

from collections.abc import Iterator, Sequence
from typing import Any

from tests.chaos.checker.formats import Entry, Job, entry_of, names_of, result_of
from tests.chaos.checker.rows import fields_of

AT_A_TIME = 200


def read_jobs(client: Any, prefix: str, job_ids: Sequence[str]) -> Iterator[Job]:  # Any: a redis-py client
    """Read every job, with its channels and its result."""
    for at in range(0, len(job_ids), AT_A_TIME):
        yield from _read_some(client, prefix, job_ids[at : at + AT_A_TIME])


def _read_some(client: Any, prefix: str, job_ids: Sequence[str]) -> Iterator[Job]:
    pipe = client.pipeline(transaction=False)
    for job_id in job_ids:
        pipe.get(f"{prefix}:job:{names_of(job_id)}")
    rows = pipe.execute()
    jobs = [
        {} if row is None else fields_of(job_id.split(".")[1], row) for job_id, row in zip(job_ids, rows, strict=True)
    ]
    leased = _leased(client, prefix)
    for job_id, found in zip(job_ids, jobs, strict=True):
        _ask_for_rest(pipe, prefix, job_id, found)
    rest = iter(pipe.execute())
    for job_id, found in zip(job_ids, jobs, strict=True):
        yield _job_of(job_id, found, job_id in leased, rest)


def _leased(client: Any, prefix: str) -> set[str]:  # Any: as above
    """Jobs that any worker's list has."""
    held = client.scan_iter(match=f"{prefix.replace('{', '[{]').replace('}', '[}]')}:held:*", count=1000)
    return {job_id.decode() for key in held for job_id in client.hkeys(key)}


def _ask_for_rest(pipe: Any, prefix: str, job_id: str, found: dict[str, str]) -> None:
    """Result, times to live, and each channel: in the order in which `_job_of` takes the replies."""
    names = names_of(job_id)
    pipe.get(f"{prefix}:result:{names}")
    for kind in ("job", "result", "payload"):
        pipe.pttl(f"{prefix}:{kind}:{names}")
    pipe.pttl(f"{prefix}:idem:{names.partition(':')[0]}:{found.get('key', '')}")
    for choice in range(int(found.get("choices") or 0)):
        pipe.pttl(f"{prefix}:channel:{names}:{choice}")
        pipe.xrange(f"{prefix}:channel:{names}:{choice}")


def _job_of(job_id: str, found: dict[str, str], has_lease: bool, rest: Iterator[Any]) -> Job:
    result = next(rest)
    kept_ms = {name: next(rest) for name in ("job", "result", "payload", "idem")}
    channels: list[tuple[Entry, ...] | None] = []
    for choice in range(int(found.get("choices") or 0)):
        kept_ms[f"channel {choice}"], entries = next(rest), next(rest)
        is_there = kept_ms[f"channel {choice}"] != -2
        channels.append(tuple(entry_of(*entry) for entry in entries) if is_there else None)
    return Job(
        id=job_id,
        fields=found,
        channels=tuple(channels),
        result=None if result is None else result_of(result),
        has_payload=kept_ms["payload"] != -2,
        has_lease=has_lease,
        kept_ms={name: kept for name, kept in kept_ms.items() if kept != -2},
    )
