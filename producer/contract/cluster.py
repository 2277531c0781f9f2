"""A Redis Cluster as the queue sees it: which shard holds a partition, and how a round trip is cut into its shards'.

All keys of a partition lie in one slot, so a command goes where its first key lies. Knows no connection: addresses and
commands go out, replies come back.

    redis+cluster://[USER:PASSWORD@]HOST:PORT[,HOST:PORT…][?OPTION=VALUE]     (rediss+cluster:// for TLS)
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, NoPermissionError
from redis.exceptions import ConnectionError as RedisConnectionError

DEFAULT_PORT = 6379
MAX_MOVES = 5
"""How often one round trip follows slots that moved."""

Address: TypeAlias = tuple[str, int]
Command: TypeAlias = tuple[Any, ...]  # Any: whatever redis-py sends
Reply: TypeAlias = object

LOOK: Command = ("CLUSTER", "SLOTS")
"""Asks a node who serves what; `SlotTable.read` reads the reply."""

_TAG = re.compile(rb"\{[^{}]+:\d+\}:")
"""How each of our keys begins."""


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """Where to ask first, and how to speak to every node."""

    seeds: tuple[Address, ...]
    _scheme: str
    _credentials: str
    _query: str

    def url_of(self, address: Address) -> str:
        """A plain URL for one node."""
        host, port = address
        shown = f"[{host}]" if ":" in host else host
        return f"{self._scheme}://{self._credentials}{shown}:{port}/0{self._query}"


@dataclass(frozen=True, slots=True)
class Each:
    """What each shard said to one command, where they say different things: whoever reads it judges every one."""

    replies: tuple[Reply, ...]


def is_cluster(url: str) -> bool:
    """Whether a URL is one of a Cluster."""
    return "+cluster://" in url


def read_url(url: str) -> ClusterUrl:
    """Take a Cluster's URL apart.

    Raises:
        ValueError: it names no node, a port that is none, or a database (a Cluster has only one).
    """
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    if not hosts:
        raise ValueError("expected redis+cluster://HOST:PORT,HOST:PORT")
    if parts.path.strip("/") not in ("", "0"):
        raise ValueError("a Cluster has no database numbers")
    query = f"?{parts.query}" if parts.query else ""
    seeds = tuple(_address(host) for host in hosts.split(","))
    return ClusterUrl(seeds, parts.scheme.removesuffix("+cluster"), credentials + at, query)


def _address(host: str) -> Address:
    name, colon, port = host.rpartition(":")
    return (name.strip("[]"), int(port)) if colon else (host, DEFAULT_PORT)


class SlotTable:
    """Who serves which slot."""

    def __init__(self, ranges: Iterable[tuple[int, int, Address]]) -> None:
        self._ranges = sorted(ranges)
        self._starts = [start for start, _, _ in self._ranges]

    @classmethod
    def read(cls, reply: Reply, asked: Address) -> "SlotTable":
        """From the reply of the node that was asked: a node without a name of its own is that one.

        Raises:
            ValueError: the reply is not one of a Cluster.
            NoPermissionError: this user may not ask.
        """
        if isinstance(reply, NoPermissionError):
            raise reply
        if isinstance(reply, Exception):
            # No wrong type, whatever its class: what the server said shows that the URL is wrong.
            raise ValueError(f"it is no Cluster's node: {reply}. Give a redis:// URL for a single server")  # noqa: TRY004
        rows = cast("list[list[Any]]", reply)  # redis's own reply: [start, end, [host, port, …], replicas …]
        return cls((int(start), int(end), (_text(node[0]) or asked[0], int(node[1]))) for start, end, node, *_ in rows)

    @property
    def addresses(self) -> list[Address]:
        """Every shard's primary."""
        return list(dict.fromkeys(address for _, _, address in self._ranges))

    def shard_of(self, slot: int) -> Address | None:
        """Who serves a slot; None: nobody."""
        at = bisect_right(self._starts, slot) - 1
        if at < 0:
            return None
        _, end, address = self._ranges[at]
        return address if slot <= end else None


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def slot_of(command: Command) -> int | None:
    """The slot of a command's first key; None: it has no key of ours."""
    for argument in command[1:]:
        data = argument.encode() if isinstance(argument, str) else argument
        if isinstance(data, bytes) and _TAG.match(data):
            return key_slot(data)
    return None


@dataclass(frozen=True, slots=True)
class Part:
    """What one shard is sent of a round trip."""

    address: Address
    places: tuple[int, ...]
    commands: tuple[Command, ...]


@dataclass(slots=True)
class Trip:
    """Commands on their way to their shards, and what came back. Changes with every part that is heard.

    What has no key goes to every shard that the rest goes to, after it (or to any, if there is no rest): so a WAIT
    speaks of all writes of the trip.
    """

    commands: Sequence[Command]
    _heard: dict[int, list[Reply]] = field(default_factory=dict[int, list[Reply]])

    def parts(self, table: SlotTable) -> list[Part]:
        """What is still to be sent, by shard; a slot that nobody serves is answered at once."""
        by_shard: dict[Address, list[int]] = {}
        for place, command in enumerate(self.commands):
            slot = slot_of(command)
            if slot is None or place in self._heard:
                continue
            address = table.shard_of(slot)
            if address is None:
                self._heard[place] = [ClusterDownError(f"CLUSTERDOWN nobody serves slot {slot}")]
            else:
                by_shard.setdefault(address, []).append(place)
        if not by_shard and len(self._heard) < len(self.commands) and table.addresses:
            by_shard[table.addresses[0]] = []
        keyless = [place for place, command in enumerate(self.commands) if slot_of(command) is None]
        return [self._part(address, sorted([*keyed, *keyless])) for address, keyed in by_shard.items()]

    def _part(self, address: Address, places: list[int]) -> Part:
        return Part(address, tuple(places), tuple(self.commands[place] for place in places))

    def heard(self, part: Part, replies: Sequence[Reply]) -> None:
        """Take a shard's replies; what it says has moved stays to be sent.

        Raises:
            RedisConnectionError: a slot is on its way between two shards.
        """
        stayed = {place: reply for place, reply in zip(part.places, replies, strict=True) if not _has_moved(reply)}
        keyed = [place for place in part.places if slot_of(self.commands[place]) is not None]
        if keyed and not any(place in stayed for place in keyed):
            return  # another shard's words are what counts
        for place, reply in stayed.items():
            self._heard.setdefault(place, []).append(reply)

    @property
    def is_done(self) -> bool:
        """Whether every command has its reply."""
        return len(self._heard) == len(self.commands)

    def answer(self) -> list[Reply]:
        """One reply for each command."""
        return [_joined(self._heard[place]) for place in range(len(self.commands))]


def _has_moved(reply: Reply) -> bool:
    has_moved = isinstance(reply, MovedError)
    if isinstance(reply, AskError) and not has_moved:  # redis-py counts the first among the second
        raise RedisConnectionError(f"a slot is being moved: {reply}") from reply
    return has_moved


def _joined(replies: list[Reply]) -> Reply:
    """One reply of several shards: an error if there is one, of counts the least (WAIT, WAITAOF), else what all say."""
    errors = [reply for reply in replies if isinstance(reply, Exception)]
    if errors or len(replies) == 1:
        return (errors or replies)[0]
    if all(isinstance(reply, int) for reply in replies):
        return min(cast("list[int]", replies))
    if all(_is_counts(reply) for reply in replies):
        return [min(counts) for counts in zip(*cast("list[list[int]]", replies), strict=True)]
    return replies[0] if all(reply == replies[0] for reply in replies) else Each(tuple(replies))


def _is_counts(reply: Reply) -> bool:
    return isinstance(reply, list) and all(isinstance(one, int) for one in cast("list[object]", reply))


def spread(command: Command) -> list[Command]:
    """An XREAD of several slots as one for each, without BLOCK; any other command alone."""
    if command[0] != "XREAD":
        return [command]
    at = command.index("STREAMS") + 1
    names, ids = command[at : (at + len(command)) // 2], command[(at + len(command)) // 2 :]
    by_slot: dict[int | None, list[int]] = {}
    for place, name in enumerate(names):
        by_slot.setdefault(slot_of(("", name)), []).append(place)
    if len(by_slot) < 2:
        return [command]
    head = command[: command.index("BLOCK")] if "BLOCK" in command else command[: at - 1]
    return [
        (*head, "STREAMS", *(names[place] for place in places), *(ids[place] for place in places))
        for places in by_slot.values()
    ]


def block_s(command: Command) -> float:
    """How long an XREAD may block."""
    return command[command.index("BLOCK") + 1] / 1000 if "BLOCK" in command else 0.0
