"""The living workers of a queue, as their heartbeats describe them. No I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sluice.protocol.calls import QueueView

SAMPLE_S, NUM_SAMPLES = 10, 30
"""Length and number of the last samples that a heartbeat has."""


MAX_PID, MAX_NUMBER = 2**22, 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Ten seconds of a worker."""

    running: int
    waiting: int
    kv_share: float
    tokens_in: int
    """Prompt tokens a second, and in `tokens_out` those of outputs."""

    tokens_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A living worker, as its last heartbeat describes it."""

    id: str
    queue: str
    host: str
    name: str
    model: str
    version: str
    device: str
    pid: int | None
    """On its host."""

    state: str
    """pulling or quiet."""

    places: int
    """Sequences that can run at once; 0 if it does not say."""

    running: int
    """Sequences that run."""

    waiting: int
    """Sequences that wait in its engine."""

    kv_share: float
    tokens_per_s: float
    started_ms: int | None
    samples: tuple[Sample, ...]


def workers_of(queue: str, views: Sequence[QueueView]) -> Iterator[WorkerRow]:
    """Yield the living workers of a queue, by host; `views` are its partitions."""
    known = {name: about for view in views for name, about in view.workers.items()}
    for name, about in sorted(known.items(), key=lambda item: (item[1].get("host", ""), item[0])):
        yield WorkerRow(
            id=name,
            queue=queue,
            host=about.get("host", "?"),
            name=about.get("name", "-"),
            model=about.get("model", "?"),
            version=about.get("version", "?"),
            device=about.get("device", "?"),
            pid=_pid(about),
            state=about.get("state", "?"),
            places=int(_number(about, "places")),
            running=int(_number(about, "running")),
            waiting=int(_number(about, "waiting")),
            kv_share=_number(about, "kv_tokens_used") / max(1.0, _number(about, "kv_tokens_total")),
            tokens_per_s=_number(about, "tokens_per_s"),
            started_ms=int(_number(about, "started_ms")) or None,
            samples=samples_of(about.get("recent", "")),
        )


def samples_of(text: str) -> tuple[Sample, ...]:
    """Read the samples of a heartbeat. Of one that cannot be read, there are none."""
    try:
        rows = [[int(value) for value in row.split(",")] for row in text.split(";") if row]
        found = [
            Sample(running=row[0], waiting=row[1], kv_share=row[2] / 1000, tokens_in=row[3], tokens_out=row[4])
            for row in rows
        ]
    except (ValueError, IndexError, OverflowError):
        return ()
    return tuple(found[-NUM_SAMPLES:])


def _pid(about: Mapping[str, str]) -> int | None:
    """Return its process id; None if it is not an id that a kernel assigns: others mean groups of processes."""
    pid = int(_number(about, "pid"))
    return pid if 0 < pid <= MAX_PID else None


def _number(about: Mapping[str, str], name: str) -> float:
    """Read a field of a heartbeat, which anyone with a worker's rights writes; 0 if it is not a count or rate."""
    try:
        value = float(about.get(name, "0"))
    except ValueError:
        return 0.0
    return value if 0 <= value <= MAX_NUMBER else 0.0
