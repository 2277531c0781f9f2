"""The living workers of a queue, from their heartbeats. No I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sluice.protocol.calls import QueueView
from sluice.protocol.offers import Offer

SAMPLE_S, NUM_SAMPLES = 10, 30
"""Duration in seconds, and number, of the samples in a heartbeat."""


LOADING, WAITING_FOR_ITS_TURN = "loading", "waiting_for_its_turn"
"""States of a model without a worker, for which `worker fleet` beats: it takes turns with others on one device."""

AWAY_STATES = frozenset({LOADING, WAITING_FOR_ITS_TURN})

ADAPTERS = "adapters"
"""The field of a heartbeat that has the names of adapters, separated by spaces."""

QUEUES = "queues"
"""The field of a heartbeat that has the queues of a worker with their weights, separated by spaces."""

MAX_PID, MAX_NUMBER = 2**22, 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Ten seconds of a worker."""

    running: int
    waiting: int
    kv_share: float
    tokens_in: int
    """Prompt tokens a second; in `tokens_out`, output tokens a second."""

    tokens_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A living worker, from its last heartbeat."""

    id: str
    queue: str
    host: str
    name: str
    model: str
    version: str
    device: str
    pid: int | None
    """Process id on its host."""

    state: str
    """`pulling` or `quiet`; without a worker, one of `AWAY_STATES`."""

    places: int
    """Most sequences that can run at once; 0 if unknown."""

    running: int
    """Number of running sequences."""

    waiting: int
    """Number of sequences that wait in its engine."""

    kv_share: float
    tokens_per_s: float
    started_ms: int | None
    samples: tuple[Sample, ...]
    adapters: tuple[str, ...] = ()
    """Those that jobs may name as their model."""

    offer: Offer | None = None
    """What its engine can run; None if it does not say."""

    @property
    def engine(self) -> str:
        """The name and the release of its engine."""
        return self.offer.engine if self.offer else "?"


def workers_of(queue: str, views: Sequence[QueueView]) -> Iterator[WorkerRow]:
    """Yield the living workers of a queue, ordered by host; `views`: the queue's partitions."""
    by_name = {name: about for view in views for name, about in view.workers.items()}
    for name, about in sorted(by_name.items(), key=lambda item: (item[1].get("host", ""), item[0])):
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
            adapters=tuple(about.get(ADAPTERS, "").split()),
            offer=Offer.of(about),
        )


def samples_of(text: str) -> tuple[Sample, ...]:
    """Parse the samples of a heartbeat; none if they cannot be read."""
    try:
        rows = [[int(value) for value in row.split(",")] for row in text.split(";") if row]
        samples = [
            Sample(running=row[0], waiting=row[1], kv_share=row[2] / 1000, tokens_in=row[3], tokens_out=row[4])
            for row in rows
        ]
    except (ValueError, IndexError, OverflowError):
        return ()
    return tuple(samples[-NUM_SAMPLES:])


def _pid(about: Mapping[str, str]) -> int | None:
    """Return the process id; None if it is not positive, since other numbers denote process groups."""
    pid = int(_number(about, "pid"))
    return pid if 0 < pid <= MAX_PID else None


def _number(about: Mapping[str, str], name: str) -> float:
    """Parse a field of a heartbeat, which anyone with a worker's rights may write; 0 if it is not a count or rate."""
    try:
        value = float(about.get(name, "0"))
    except ValueError:
        return 0.0
    return value if 0 <= value <= MAX_NUMBER else 0.0
