"""Read whole partitions: their state, then their workers, lanes and weights page by page. No I/O."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from sluice.producer.contract import calls
from sluice.producer.contract.calls import Lane, PartitionView, QueueView
from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.limits import LANES_PER_PAGE
from sluice.producer.contract.transport.execution import Command, Reply, command_of
from sluice.producer.errors import ProducerError
from sluice.producer.operations.operation import Ask, Operation

WAIT_FIELDS = ("state", "tokens_per_s")
"""Fields of heartbeats that say whether a job will start, and when."""

Part = tuple[Command, Callable[[Reply], None]]
"""A command, and what takes its reply."""


def survey_all(
    all_keys: Sequence[QueueKeys], *, fields: Sequence[str] = (), has_lanes: bool = True
) -> Operation[list[QueueView]]:
    """Read partitions with all their living workers and lanes. Small ones take one round trip.

    Args:
        all_keys: The partitions.
        fields: The fields of heartbeats that are wanted; all of them if empty.
        has_lanes: Whether the lanes, and the weights of tenants, are wanted.
    """
    first = 0 if has_lanes else None
    surveys = [_Survey(keys=keys, fields=tuple(fields), lanes_at=first, weights_at=first) for keys in all_keys]
    while parts := [part for survey in surveys for part in survey.parts()]:
        replies = yield Ask(tuple(command for command, _ in parts), is_lenient=True)
        for (_, take), reply in zip(parts, replies, strict=True):
            take(reply)
    return [survey.view for survey in surveys]


def survey_one(keys: QueueKeys, *, fields: Sequence[str] = ()) -> Operation[QueueView]:
    """Read one partition with all its living workers, without its lanes."""
    [view] = yield from survey_all([keys], fields=fields, has_lanes=False)
    return view


@dataclass(slots=True, eq=False, kw_only=True)
class _Survey:
    """What has been read of a partition. Changes with each reply."""

    keys: QueueKeys
    fields: tuple[str, ...]
    lanes_at: int | None
    """Cursor of the next page; None after the last. So are the next two."""

    weights_at: int | None
    workers_at: int | None = 0
    partition: PartitionView | None = None
    workers: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    lanes: list[Lane] = field(default_factory=list[Lane])
    weights: dict[str, str] = field(default_factory=dict[str, str])

    def parts(self) -> Iterator[Part]:
        """Yield what is to be read next."""
        if self.partition is None:
            yield command_of(calls.inspect(self.keys)), self._take_partition
        if self.workers_at is not None:
            yield command_of(calls.list_workers(self.keys, self.workers_at, fields=self.fields)), self._take_workers
        if self.lanes_at is not None:
            yield ("HSCAN", self.keys.key("depth"), self.lanes_at, "COUNT", LANES_PER_PAGE), self._take_lanes
        if self.weights_at is not None:
            yield ("HSCAN", self.keys.key("weights"), self.weights_at, "COUNT", LANES_PER_PAGE), self._take_weights

    @property
    def view(self) -> QueueView:
        """All of it."""
        assert self.partition is not None
        return calls.whole_view(self.partition, self.workers, self.lanes, self.weights)

    def _take_partition(self, reply: Reply) -> None:
        self.partition = calls.inspect(self.keys).parse(_sound(reply))

    def _take_workers(self, reply: Reply) -> None:
        page = calls.list_workers(self.keys).parse(_sound(reply))
        self.workers |= {name: dict(about) for name, about in page.workers.items()}
        self.workers_at = page.cursor or None

    def _take_lanes(self, reply: Reply) -> None:
        cursor, depth = cast("tuple[bytes, list[bytes]]", _sound(reply))
        self.lanes += calls.read_lanes(depth)
        self.lanes_at = int(cursor) or None

    def _take_weights(self, reply: Reply) -> None:
        # Scripts take another program's key in its place as no weights.
        cursor, weights = (b"0", []) if isinstance(reply, ProducerError) else cast("tuple[bytes, list[bytes]]", reply)
        self.weights |= calls.read_map(weights)
        self.weights_at = int(cursor) or None


def _sound(reply: Reply) -> Reply:
    """Return a reply.

    Raises:
        ProducerError: it is one.
    """
    if isinstance(reply, ProducerError):
        raise reply
    return reply
