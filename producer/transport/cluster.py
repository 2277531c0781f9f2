"""Round trips to a Redis Cluster: each command goes to the shard of its partition. Without I/O.

When a shard does not answer, or a slot has moved, the slot map is read again. What is retried, and for how long, is as
for one server, but for the whole round trip.
"""

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TypeVar, cast

from sluice.producer.errors import InvalidSetting
from sluice.producer.operations.operation import Ask, Sleep
from sluice.producer.transport.actions import Routine
from sluice.producer.transport.retries import LinkSettings, Retries, checked
from sluice.producer.transport.server import Server
from sluice.protocol.redis import urls
from sluice.protocol.redis.cluster import ClusterDriver
from sluice.protocol.redis.error_kinds import NODE_ERRORS
from sluice.protocol.redis.execution import Command, Reply
from sluice.protocol.redis.routing import Routing, block_s, split_read
from sluice.protocol.redis.slot_table import NotACluster

POLL_S = 0.02
"""A read of channels on several shards cannot block: it is repeated after this long."""

Result = TypeVar("Result")


class Cluster:
    """A Cluster, as a link sees it. Changes as nodes fail and slots move.

    Raises:
        InvalidSetting: the URL cannot be read.
    """

    def __init__(self, settings: LinkSettings) -> None:
        try:
            url = urls.read_cluster_url(settings.url)
        except ValueError as error:
            raise urls.cannot_read(settings.url, error) from None
        self.settings = settings
        self._driver = ClusterDriver(url, lambda node: Server(LinkSettings(node, settings.patience_s)))
        self._router = self._driver.router

    def ask(self, ask: Ask) -> Routine[list[Reply]]:
        """Make a round trip, and repeat it while a shard does not answer.

        Raises:
            InvalidSetting: a node is not a Cluster's.
            QueueUnreachable, QueueRefused, QueueFull: as in `Server.ask`.
        """
        if ask.commands[0][0] == "SCAN":
            return [(yield from self._scan(ask))]
        reads = split_read(ask.commands[0])
        if len(reads) == 1:
            return (yield from self._ask(ask))
        return [(yield from self._read(Ask(tuple(reads), deadline_s=ask.deadline_s), block_s(ask.commands[0])))]

    def pipe(self) -> "ClusterPipe":
        """Open a pipe, which sends nothing ahead."""
        return ClusterPipe(self)

    def _ask(self, ask: Ask) -> Routine[list[Reply]]:
        return (yield from self._repeat(lambda: self._ask_once(ask), ask))

    def _ask_once(self, ask: Ask) -> Routine[list[Reply]]:
        round_trip = self._router.round_trip(ask.commands)
        replies = yield from self._run(round_trip, is_repeatable=ask.is_repeatable)
        return checked(ask, replies, self.settings.url)

    def _repeat(self, attempt: Callable[[], Routine[Result]], ask: Ask) -> Routine[Result]:
        """Make attempts at an ask until one succeeds or there is no next one."""
        with Retries(self.settings, self._router.has_connected, ask.deadline_s) as retries:
            while True:
                try:
                    return (yield from attempt())
                except NODE_ERRORS as error:
                    self._router.forget()
                    yield Sleep(retries.next_delay_s(error, is_repeatable=ask.is_repeatable))

    def _read(self, reads: Ask, wait_s: float) -> Routine[Reply]:
        """Repeat XREADs of several slots until one has entries; return their replies as one XREAD's."""
        until_s = monotonic() + wait_s
        while True:
            replies = yield from self._ask(reads)
            found = [row for reply in replies for row in cast("list[Reply] | None", reply) or []]
            if found or monotonic() >= until_s:
                return found or None
            yield Sleep(POLL_S)

    def _scan(self, ask: Ask) -> Routine[Reply]:
        """Scan shard by shard: a cursor is `SHARD:CURSOR`."""
        [(name, cursor, *rest)] = ask.commands
        shard, _, cursor_there = str(cursor, "ascii").rpartition(":") if isinstance(cursor, bytes) else ("", "", cursor)
        place = int(shard or 0)
        addresses = yield from self._repeat(lambda: self._run(self._router.shards()), ask)
        [reply] = yield from self._driver.node(addresses[place]).ask(Ask(((name, cursor_there, *rest),)))
        next_cursor, names = cast("tuple[bytes, list[bytes]]", reply)
        if next_cursor != b"0":
            return [b"%d:%s" % (place, next_cursor), names]
        return [b"0" if place + 1 == len(addresses) else b"%d:0" % (place + 1), names]

    def _run(self, routing: Routing[Result], *, is_repeatable: bool = True) -> Routine[Result]:
        def exchange(node: Server, commands: tuple[Command, ...]) -> Routine[list[Reply]]:
            return node.exchange(Ask(commands, is_repeatable))

        try:
            return (yield from self._driver.run(routing, exchange))
        except NotACluster as error:
            raise InvalidSetting(f"{urls.redacted(self.settings.url)}: {error}.") from error


class ClusterPipe:
    """Asks that are sent one by one, each when its replies are wanted."""

    has_connection = False
    """As in `ServerPipe`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._waiting: deque[Ask] = deque()

    @property
    def is_full(self) -> bool:
        """Whether a reply should be read before more is sent."""
        return bool(self._waiting)

    def send(self, ask: Ask) -> Routine[None]:
        """Keep the ask until `receive`."""
        self._waiting.append(ask)
        yield from ()

    def receive(self) -> Routine[list[Reply]]:
        """Send the oldest ask, and wait for its replies; as `Cluster.ask`."""
        return self._cluster.ask(self._waiting.popleft())

    def close(self) -> Routine[None]:
        """Hold nothing."""
        yield from ()
