"""Independent reader of docs/reference/wire-format.md and keys.md: keys, entries, results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack as untyped_msgpack  # pyright: ignore[reportMissingTypeStubs] (it ships none)

msgpack: Any = untyped_msgpack

ENDS = ("done", "failed", "cancelled", "expired")


class Malformed(ValueError):
    """Bytes do not follow the documented format."""


def unpack(data: bytes) -> Any:  # Any: msgpack
    """Read one message.

    Raises:
        Malformed: it is none.
    """
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except Exception as error:  # msgpack raises many kinds, ValueError and its own
        raise Malformed(str(error) or type(error).__name__) from error


def names_of(job_id: str) -> str:
    """`<tenant>:<name>` of a job id."""
    _, tenant, name = job_id.split(".")
    return f"{tenant}:{name}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a channel."""

    tokens: int
    """First part of its id: tokens after it."""

    tail: int
    """Second part of its id."""

    start: int
    ids: tuple[int, ...]
    text: str
    time_ms: int
    end: dict[str, Any] | None


def entry_of(entry_id: bytes, fields: dict[bytes, bytes]) -> Entry:
    """Read a channel's entry.

    Raises:
        Malformed: it is none.
    """
    tokens, _, tail = entry_id.decode().partition("-")
    if set(fields) != {b"e"}:
        raise Malformed(f"entry {entry_id.decode()} has the fields {sorted(fields)}")
    version, start, ids, text, time_ms, _, end, *_ = unpack(fields[b"e"])
    if version != 1:
        raise Malformed(f"entry {entry_id.decode()} is of version {version}")
    return Entry(int(tokens), int(tail), start, tuple(ids), text, time_ms, end or None)


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a result."""

    text: str
    ids: tuple[int, ...]
    finish: str | None
    vector: str | None = None
    """In hexadecimal digits."""


_VECTOR = 6
"""Its place among the parts of a choice."""


def result_of(data: bytes) -> list[Choice]:
    """Read a result.

    Raises:
        Malformed: it is none.
    """
    version, choices, *_ = unpack(data)
    if version != 1:
        raise Malformed(f"a result of version {version}")
    return [Choice(one[0], tuple(one[1]), one[2], _vector_of(one)) for one in choices]


def _vector_of(choice: Sequence[Any]) -> str | None:  # Any: parts of several types
    return choice[_VECTOR].hex() if len(choice) > _VECTOR and choice[_VECTOR] else None


@dataclass(frozen=True, slots=True)
class Job:
    """The queue's data of one job."""

    id: str
    fields: dict[str, str]
    """Those of its row; empty: unknown."""

    channels: tuple[tuple[Entry, ...] | None, ...]
    """None where there is no channel."""

    result: list[Choice] | None
    has_payload: bool
    has_lease: bool
    kept_ms: dict[str, int]
    """Time to live of each of its keys that is there; -1: for ever."""

    def number(self, name: str) -> int:
        """A field that is a number; 0 where it is absent."""
        return int(self.fields.get(name) or 0)

    @property
    def state(self) -> str:
        """Its state."""
        return self.fields.get("state", "")

    @property
    def published(self) -> Sequence[tuple[int, int]]:
        """Offset and end of each choice."""
        pairs = [part.split(":") for part in self.fields.get("published", "").split(",") if part]
        return [(int(offset), int(end)) for offset, end in pairs]
