"""Independent reader and writer of docs/reference/keys.md: the rows of jobs, and leases."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack as untyped_msgpack  # pyright: ignore[reportMissingTypeStubs] (it ships none)

from tests.chaos.checker.formats import Malformed, unpack

msgpack: Any = untyped_msgpack

_STATES = {"q": "queued", "r": "running", "d": "done", "f": "failed", "c": "cancelled", "e": "expired"}
_NUMBERS = ("class", "choices", "is_returned", "version", "attempt", "epoch", "failures", "requeues", "max_tokens")
_LONG = (
    "prompt", "cost", "bytes", "submitted", "started", "charged", "number", "before", "scheduled", "first_token",
    "ended",
)  # fmt: skip
_HEAD = struct.Struct(f"<ccBBBIIIIII{6 * len(_LONG)}s")
_ZERO = ("class", "prompt", "cost", "bytes", "version", "max_tokens", "is_returned")
"""Fields that are there when they are 0."""


def fields_of(tenant: str, row: bytes) -> dict[str, str]:
    """The fields of a job as text, without those that are absent.

    Raises:
        Malformed: the row is none.
    """
    try:
        return _fields_of(tenant, row)
    except Exception as error:  # msgpack raises many kinds, ValueError and its own
        raise Malformed(f"a row: {error}") from error


def _fields_of(tenant: str, row: bytes) -> dict[str, str]:
    version, letter, *numbers, long = _HEAD.unpack_from(row)
    if version != b"1":
        raise Malformed(f"a row of version {version!r}")
    numbers += [int.from_bytes(long[at : at + 6], "little") for at in range(0, len(long), 6)]
    found: dict[str, Any] = dict(zip(_NUMBERS + _LONG, numbers, strict=True))
    found = {name: value for name, value in found.items() if value or name in _ZERO}
    if "charged" in found:
        found["charged"] -= 1
    entry, owner, rest = row[_HEAD.size :].split(b"\0", 2)
    digest, rest = _cut(rest, "<H")
    seed, rest = _cut(rest, "<B")
    rare, spec = _cut(rest, "<I")
    is_returned = found.pop("is_returned", 0)
    if entry:
        found |= {"entry": entry, "lane": f"{'returned' if is_returned else found['class']}:{tenant}"}
    found |= {"state": _STATES[letter.decode()], "owner": owner, "digest": digest, "seed": seed, "spec": spec}
    # Texts may be any bytes.
    found |= {name.decode(): value for name, value in msgpack.unpackb(rare, raw=True).items()} if rare else {}
    if found["choices"] == 1 and _needs_no_channel(spec):
        found["silent"] = 1
    return {name: _text(value) for name, value in found.items() if value != b""}


def _needs_no_channel(spec: bytes) -> bool:
    """Whether a job with this spec has no channel if it is done early: it is neither streamed nor awaited."""
    try:
        _, values, *_ = unpack(spec)
        return not values.get("stream", True) and not values.get("awaited", False)
    except (Malformed, TypeError, ValueError, AttributeError):
        return False


def _cut(data: bytes, size: str) -> tuple[bytes, bytes]:
    (length,) = struct.unpack_from(size, data)
    start = struct.calcsize(size)
    if start + length > len(data):
        raise Malformed("a row that ends within a text")
    return data[start : start + length], data[start + length :]


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def row_of(fields: Mapping[str, Any]) -> bytes:  # Any: text or numbers
    """The row of these fields; rare ones, and any that no row has, are in its map."""
    rest = dict(fields)
    letter = str(rest.pop("state"))[0].encode()
    rest.pop("silent", None)
    rest["is_returned"] = str(rest.pop("lane", "")).startswith("returned")
    numbers = [int(rest.pop(name, 0)) for name in _NUMBERS]
    rest["charged"] = int(rest.get("charged", -1)) + 1
    long = b"".join(int(rest.pop(name, 0)).to_bytes(6, "little") for name in _LONG)
    entry, owner, digest, seed, spec = (
        _bytes(rest.pop(name, "")) for name in ("entry", "owner", "digest", "seed", "spec")
    )
    rare = (
        msgpack.packb({name: _typed(name, value) for name, value in rest.items()}, use_bin_type=False) if rest else b""
    )
    return b"".join(
        (
            _HEAD.pack(b"1", letter, *numbers, long), entry, b"\0", owner, b"\0",
            struct.pack("<H", len(digest)), digest, struct.pack("<B", len(seed)), seed,
            struct.pack("<I", len(rare)), rare, spec,
        )
    )  # fmt: skip


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


_RARE_NUMBERS = (
    "not_before", "ttl", "deadline", "callback", "line", "gap", "retry", "waits_since", "output",
)  # fmt: skip


def _typed(name: str, value: object) -> object:
    return int(value) if name in _RARE_NUMBERS and isinstance(value, str) and value.isdigit() else value


@dataclass(frozen=True, slots=True)
class Lease:
    """What a worker's list says of a job."""

    epoch: int
    pull: int
    place: int
    flag: str
    mark: str
    has_deaths: bool
    offsets: tuple[int, ...]
    """Of each choice; likewise `ends`: 0 no, 1 yes, 2 well."""

    ends: tuple[int, ...]


def lease_of(data: bytes) -> Lease:
    """Read a lease.

    Raises:
        Malformed: it is none.
    """
    head = struct.Struct("<IIHBccB")
    if len(data) < head.size or (len(data) - head.size) % 5:
        raise Malformed("a lease of the wrong length")
    epoch, low, high, place, flag, mark, has_deaths = head.unpack_from(data)
    choices = list(struct.iter_unpack("<IB", data[head.size :]))
    flags = {b" ": "", b"c": "cancelled", b"e": "expired"}
    return Lease(
        epoch, low | high << 32, place, flags[flag], mark.decode().strip(), bool(has_deaths),
        tuple(offset for offset, _ in choices), tuple(end for _, end in choices),
    )  # fmt: skip
