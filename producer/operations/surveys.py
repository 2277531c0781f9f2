"""Read whole partitions: the state, then workers, lanes and tenants, page by page. No I/O."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from sluice.producer.errors import ProducerError
from sluice.producer.operations.operation import Ask, Operation
from sluice.protocol import calls
from sluice.protocol.calls import PartitionView, QueueView, TenantLimit
from sluice.protocol.keys import QueueKeys
from sluice.protocol.limits import LANES_PER_PAGE
from sluice.protocol.redis.execution import Command, Reply, command_of

WAIT_FIELDS = ("state", "tokens_per_s")
"""Fields of heartbeats that tell whether a job will start, and when."""

Part = tuple[Command, Callable[[Reply], None]]
"""A command, and the function that receives its reply."""


def survey_all(
    all_keys: Sequence[QueueKeys], *, fields: Sequence[str] = (), has_lanes: bool = True
) -> Operation[list[QueueView]]:
    """Read partitions with all their living workers and lanes; small partitions in one round trip.

    Args:
        all_keys: The partitions.
        fields: The fields of heartbeats to read; all if empty.
        has_lanes: Whether to read the lanes, and the waiting jobs, weights and limits of tenants.
    """
    lists = calls.LISTS if has_lanes else ()
    surveys = [
        _Survey(keys=keys, fields=tuple(fields), has_lanes=has_lanes, lists_at=dict.fromkeys(lists, 0))
        for keys in all_keys
    ]
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
    """The data of a partition read so far. Changes with each reply."""

    keys: QueueKeys
    fields: tuple[str, ...]
    has_lanes: bool
    lists_at: dict[str, int]
    """Cursor of the next page of each unfinished list."""

    workers_at: int | None = 0
    """Cursor of the next page of workers; None after the last page."""

    partition: PartitionView | None = None
    limits_at: int | None = None
    """Cursor of the next page of limits; None without limits, or after the last page."""

    workers: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    lists: dict[str, dict[bytes, bytes]] = field(default_factory=dict[str, dict[bytes, bytes]])
    limits: dict[str, TenantLimit] = field(default_factory=dict[str, TenantLimit])

    def parts(self) -> Iterator[Part]:
        """Yield the next reads."""
        if self.partition is None:
            yield command_of(calls.inspect(self.keys)), self._take_partition
        if self.workers_at is not None:
            yield command_of(calls.list_workers(self.keys, self.workers_at, fields=self.fields)), self._take_workers
        if self.limits_at is not None:
            yield command_of(calls.list_limits(self.keys, self.limits_at)), self._take_limits
        for name, cursor in self.lists_at.items():
            yield ("HSCAN", self.keys.key(name), cursor, "COUNT", LANES_PER_PAGE), partial(self._take_list, name)

    @property
    def view(self) -> QueueView:
        """The whole state of the partition."""
        assert self.partition is not None
        return calls.whole_view(self.partition, self.workers, self.lists, self.limits)

    def _take_partition(self, reply: Reply) -> None:
        self.partition = calls.inspect(self.keys).parse(_sound(reply))
        if self.partition.has_limits and self.has_lanes:
            self.limits_at = 0

    def _take_limits(self, reply: Reply) -> None:
        page = calls.list_limits(self.keys).parse(_sound(reply))
        self.limits |= {limit.tenant: limit for limit in page.limits}
        self.limits_at = page.cursor or None

    def _take_workers(self, reply: Reply) -> None:
        page = calls.list_workers(self.keys).parse(_sound(reply))
        self.workers |= {name: dict(about) for name, about in page.workers.items()}
        self.workers_at = page.cursor or None

    def _take_list(self, name: str, reply: Reply) -> None:
        # Scripts treat a key of another type, written by another program, as empty.
        is_foreign = isinstance(reply, ProducerError) and name != "depth"
        cursor, flat = (b"0", []) if is_foreign else cast("tuple[bytes, list[bytes]]", _sound(reply))
        self.lists.setdefault(name, {}).update(zip(flat[::2], flat[1::2], strict=True))
        if int(cursor):
            self.lists_at[name] = int(cursor)
        else:
            del self.lists_at[name]


def _sound(reply: Reply) -> Reply:
    """Return a reply, or raise it if it is an error.

    Raises:
        ProducerError: the reply is an error.
    """
    if isinstance(reply, ProducerError):
        raise reply
    return reply
