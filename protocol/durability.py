"""Durability levels, the server settings that they need, and how they are confirmed. No I/O.

memory      the server has accepted the job; what it survives depends on the server's settings
aof         and the server writes an append-only file
fsync       and the job was on the server's disk before submit returned
replica:N   the job was in the memory of N replicas before submit returned
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias, cast

from sluice.protocol.errors import InvalidJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.routing import ShardReplies

Command: TypeAlias = tuple[str | int, ...]

WAITAOF_SINCE = (7, 2)
"""The Redis version; every Valkey has it and reports a compatible version."""

LOOK: tuple[Command, ...] = (("INFO", "persistence"), ("CONFIG", "GET", "*appendfsync*"))
"""Commands that read the state of the append-only file."""

FACTS: tuple[Command, ...] = (*LOOK, ("INFO", "server"), ("INFO", "replication"))
"""Commands whose replies `persistence_of` needs."""


class Level(StrEnum):
    """Kinds of durability, weakest first. `replica` is separate: it does not concern disks."""

    MEMORY = "memory"
    AOF = "aof"
    FSYNC = "fsync"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Durability:
    """A requested durability."""

    level: Level
    replicas: int = 0
    """Number of replicas that must have the job; only for level `replica`."""

    def __str__(self) -> str:
        return f"{self.level}:{self.replicas}" if self.level is Level.REPLICA else str(self.level)


MEMORY = Durability(Level.MEMORY)


def read_durability(text: object) -> Durability:
    """Parse a durability.

    Raises:
        InvalidJob: the text is not one.
    """
    level, _, count = text.partition(":") if isinstance(text, str) else ("", "", "")
    if level in (Level.MEMORY, Level.AOF, Level.FSYNC) and text == level:
        return Durability(Level(level))
    if level == Level.REPLICA and count.isascii() and count.isdigit() and int(count) > 0:
        return Durability(Level.REPLICA, int(count))
    raise InvalidJob(f"durability must be memory, aof, fsync or replica:N with N of 1 or more, got {text!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Persistence:
    """The persistence and replication settings of a server."""

    is_appending: bool
    is_append_failing: bool
    """Whether the last write to the append-only file failed."""

    appendfsync: str | None
    """None if this user may not read it."""

    skips_fsync: bool
    """Whether nothing is synced while the file is rewritten (`no-appendfsync-on-rewrite`)."""

    has_waitaof: bool
    replicas: int
    """Number of replicas that are online."""

    def objection(self, durability: Durability) -> str | None:
        """Return why this server cannot guarantee a durability, and what to do; None if it can."""
        match durability.level:
            case Level.MEMORY:
                return None
            case Level.AOF:
                return self._objection_to_aof()
            case Level.FSYNC:
                return self._objection_to_aof() or self._objection_to_fsync()
            case Level.REPLICA if self.replicas < durability.replicas:
                return f"{self.replicas} of {durability.replicas} replicas follow it. Add replicas, or ask for fewer."
            case Level.REPLICA:
                return None

    def _objection_to_aof(self) -> str | None:
        if not self.is_appending:
            return "its append-only file is off. Set `appendonly yes` there."
        if self.is_append_failing:
            return "it cannot write its append-only file. Look at its log, and at the space on its disk."
        return None

    def _objection_to_fsync(self) -> str | None:
        if self.appendfsync is None:
            return "this user may not ask for `appendfsync`. Allow it CONFIG GET, or ask for aof."
        if self.appendfsync != "always":
            return (
                f"`appendfsync` is {self.appendfsync}, so it answers before the job is on disk. "
                "Set `appendfsync always` there, or ask for aof."
            )
        if self.skips_fsync and not self.has_waitaof:
            return "`no-appendfsync-on-rewrite` is yes, so it may answer before the job is on disk. Set it to no there."
        return None


def persistence_of(info: Mapping[str, object], config: Mapping[str, str] | None) -> Persistence:
    """Parse INFO (server, persistence and replication), and CONFIG GET if it is allowed."""
    version = [int(part) for part in str(info.get("redis_version", "0")).split(".")[:2] if part.isdigit()]
    return Persistence(
        is_appending=str(info.get("aof_enabled", "0")) == "1",
        is_append_failing=info.get("aof_last_write_status", "ok") != "ok",
        appendfsync=None if config is None else config.get("appendfsync"),
        skips_fsync=config is not None and config.get("no-appendfsync-on-rewrite") == "yes",
        has_waitaof="valkey_version" in info or tuple(version) >= WAITAOF_SINCE,
        replicas=sum(bool(re.fullmatch(r"slave\d+", name)) and "online" in str(info[name]) for name in info),
    )


def persistence_in(replies: Sequence[object]) -> Persistence | None:
    """Parse the replies to `FACTS` or to `LOOK`; None if this user may not run INFO."""
    first, config, *rest = replies
    infos = [first, *rest]
    if not all(isinstance(info, bytes) for info in infos):
        return None
    # A flat reply: name, value, name, value …; an error where CONFIG is not allowed.
    flat = [part.decode() for part in cast("list[bytes]", config)] if isinstance(config, list) else None
    named = None if flat is None else dict(zip(flat[::2], flat[1::2], strict=True))
    return persistence_of(_lines(b"\n".join(cast("list[bytes]", infos))), named)


def by_shard(replies: Sequence[object]) -> list[list[object]]:
    """Split replies by shard; a reply that is not per shard counts for every shard."""
    count = max((len(reply.replies) for reply in replies if isinstance(reply, ShardReplies)), default=1)
    return [[reply.replies[i] if isinstance(reply, ShardReplies) else reply for reply in replies] for i in range(count)]


def _lines(info: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in info.decode(errors="replace").splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}


@dataclass(frozen=True, slots=True)
class DurabilityCheck:
    """The commands that confirm a submit, sent after its jobs in the same round trip, and their reply parser."""

    asked: Durability
    timeout_ms: int = 0
    has_waitaof: bool = False

    @property
    def is_asked(self) -> bool:
        """Whether any command follows the jobs."""
        return self.asked.level is not Level.MEMORY

    def commands(self, partitions: Sequence[QueueKeys]) -> tuple[Command, ...]:
        """Return the commands to send after the jobs of these partitions, on the same connection."""
        # WAIT and WAITAOF cover the last write of their connection. A duplicate job writes nothing, so add a write
        # that changes nothing.
        touches: list[Command] = [("HINCRBY", keys.key("counters"), "submitted", 0) for keys in partitions]
        match self.asked.level:
            case Level.MEMORY:
                return ()
            case Level.FSYNC if self.has_waitaof:
                return (*LOOK, *touches, ("WAITAOF", 1, 0, self.timeout_ms))
            case Level.AOF | Level.FSYNC:
                return LOOK
            case Level.REPLICA:
                return (*touches, ("WAIT", self.asked.replicas, self.timeout_ms))

    def doubt(self, replies: Sequence[object]) -> str | None:
        """Return why the jobs before these replies may be less durable than requested; None if they are not."""
        match self.asked.level:
            case Level.MEMORY:
                return None
            case Level.AOF:
                return self._doubt_of_file(replies)
            case Level.FSYNC:
                return self._doubt_of_file(replies) or self._doubt_of_disk(replies[-1])
            case Level.REPLICA:
                return self._doubt_of_replicas(replies[-1])

    def _doubt_of_file(self, replies: Sequence[object]) -> str | None:
        # Read again after the jobs: after a failover, this is another server.
        doubts = (self._doubt_of_server(of_one) for of_one in by_shard(replies[: len(LOOK)]))
        return next((doubt for doubt in doubts if doubt is not None), None)

    def _doubt_of_server(self, replies: Sequence[object]) -> str | None:
        persistence = persistence_in(replies)
        if persistence is None:
            return str(replies[0])
        return replace(persistence, has_waitaof=self.has_waitaof).objection(self.asked)

    def _doubt_of_disk(self, reply: object) -> str | None:
        if not self.has_waitaof:
            return None  # without WAITAOF, the server answers only once the job is on disk
        if not isinstance(reply, list):
            return str(reply)
        return None if reply[0] else f"it was not on disk after {self.timeout_ms / 1000:g} s."

    def _doubt_of_replicas(self, reply: object) -> str | None:
        if not isinstance(reply, int):
            return str(reply)
        waited = f"{reply} of {self.asked.replicas} replicas had it after {self.timeout_ms / 1000:g} s."
        return None if reply >= self.asked.replicas else waited


NOTHING_ASKED = DurabilityCheck(MEMORY)
"""The check of level `memory`: no commands."""
