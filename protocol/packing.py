"""Typed wrappers of msgpack, which is called only here; checks of unpacked types; and the framing of messages.

The `_script` functions are for Redis's Lua library, which does not support the bin type: they pack bytes and text as
raw strings, and unpack strings as bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from operator import attrgetter
from threading import local
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import msgpack as untyped_msgpack  # pyright: ignore[reportMissingTypeStubs] (it ships none)

from sluice.protocol.errors import InvalidJob, WireError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

msgpack: Any = untyped_msgpack  # Any: it has no types; the casts below follow its documentation


class _Packers(local):
    """Packers per thread, cached because creating one costs as much as packing an entry."""

    def __init__(self) -> None:
        self.pack = cast("Callable[[object], bytes]", msgpack.Packer().pack)
        self.pack_raw = cast("Callable[[object], bytes]", msgpack.Packer(use_bin_type=False).pack)


_packers = _Packers()


def pack(value: object) -> bytes:
    """Pack a message.

    Raises:
        ValueError: text is not UTF-8 (UnicodeEncodeError).
        OverflowError: a number needs more than 64 bits.
    """
    return _packers.pack(value)


def unpack(data: bytes | memoryview) -> Any:  # noqa: ANN401 (Any: as above)
    """Unpack a message.

    Raises:
        ValueError: the data is not msgpack, or nested too deeply.
        TypeError: a map has a key that is not hashable.
    """
    return msgpack.unpackb(data, strict_map_key=False)


def items_of(array: memoryview) -> Iterator[memoryview]:
    """Yield the packed items of a packed array, one at a time, because unpacked items need many times their bytes.

    Raises:
        ValueError: the data is not a msgpack array.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(array)))
    try:
        unpacker.feed(array)
        num_items = unpacker.read_array_header()
        begin: int = unpacker.tell()
        for _ in range(num_items):
            unpacker.skip()
            end: int = unpacker.tell()
            yield array[begin:end]
            begin = end
    except msgpack.UnpackException as error:
        raise ValueError(f"not a whole array: {type(error).__name__}") from error


def pack_for_script(value: object) -> bytes:
    """Pack an argument of a script: bytes and text become raw strings. Integers must not exceed 2^53."""
    return _packers.pack_raw(value)


def unpack_from_script(data: bytes) -> Any:  # noqa: ANN401 (Any: as above)
    """Unpack a reply or event of a script: every string becomes bytes."""
    return msgpack.unpackb(data, raw=True, strict_map_key=False)


def as_int(value: object) -> int:
    """Return an integer; raises WireError for another type, as the functions below do."""
    if type(value) is not int:
        raise WireError(f"expected a whole number, got {value!r}")
    return value


def as_float(value: object) -> float:
    """Return a number, as a float."""
    if type(value) is not float and type(value) is not int:
        raise WireError(f"expected a number, got {value!r}")
    return float(value)


def as_str(value: object) -> str:
    """Return text."""
    if type(value) is not str:
        raise WireError(f"expected text, got {type(value).__name__}")
    return value


def as_str_or_none(value: object) -> str | None:
    """Return text or None."""
    return None if value is None else as_str(value)


def as_bytes(value: object) -> bytes:
    """Return bytes."""
    if type(value) is not bytes:
        raise WireError(f"expected bytes, got {type(value).__name__}")
    return value


def as_list(value: object) -> list[object]:
    """Return a list of anything."""
    if not isinstance(value, list):
        raise WireError(f"expected a list, got {type(value).__name__}")
    return cast("list[object]", value)


def as_ints(value: object) -> tuple[int, ...]:
    """Return a list of integers."""
    return tuple(map(as_int, as_list(value)))


# ---------------------------------------------------------------- messages: an array that begins with its version

WIRE_VERSION = 1
"""The first item of every message. Readers accept this version and all lower ones."""


class Reading:
    """A context that converts any error in reading the fields of a message to a WireError."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UNREADABLE):
            raise WireError(f"not a {self._name}: {error}") from error


UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


def open_message(data: bytes, name: str, max_bytes: int, *, at_least: int) -> list[Any]:  # Any: msgpack is untyped
    """Unpack a message's array and check its version; `name`: of the message, for errors."""
    if len(data) > max_bytes:
        raise WireError(f"a {name} of {len(data)} bytes; at most {max_bytes} are read")
    try:
        message: object = unpack(data)
    except UNREADABLE as error:
        raise WireError(f"not a {name}: {error}") from error
    if not isinstance(message, list) or not message:
        raise WireError(f"not a {name}: it is not an array that begins with a version")
    items = cast("list[Any]", message)  # Any: msgpack is untyped
    check_version(items[0], name)
    if len(items) < at_least:
        raise WireError(f"not a {name}: {len(items)} parts where {at_least} are needed")
    return items


def check_version(version: object, name: str) -> None:
    """Check the version at the beginning of a message."""
    if type(version) is not int or version < 1:
        raise WireError(f"not a {name}: it does not begin with a version")
    if version > WIRE_VERSION:
        raise WireError(f"a {name} of version {version}; this program reads up to {WIRE_VERSION}: update it")


def packed(message: object) -> bytes:
    """Pack a message.

    Raises:
        InvalidJob: text is not UTF-8, or a number needs more than 64 bits.
    """
    try:
        return pack(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidJob(f"cannot be sent: {error}") from error


def bounded(data: bytes, name: str, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise WireError(f"a {name} of {len(data)} bytes; at most {max_bytes} are written")
    return data


# ---------------------------------------------------------------- maps of fields


def known_fields(
    kind: "type[DataclassInstance]", values: Mapping[str, Any]
) -> dict[str, Any]:  # Any: the dataclass checks each value
    """Return the values that are fields in this version."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def changed_fields(value: "DataclassInstance", *, skip: str = "") -> dict[str, object]:
    """Return the fields that differ from their defaults."""
    names, defaults, read = _defaults(type(value), skip)
    return {name: now for name, default, now in zip(names, defaults, read(value), strict=True) if now != default}


@cache
def _defaults(
    kind: "type[DataclassInstance]", skip: str
) -> tuple[Iterable[str], Iterable[object], Callable[[object], Iterable[object]]]:
    """Return the names of the fields except `skip`, their defaults, and a function that reads all of them at once."""
    kept = [field for field in fields(kind) if field.name != skip]
    names = [field.name for field in kept]
    defaults = [field.default if field.default_factory is MISSING else field.default_factory() for field in kept]
    return names, defaults, attrgetter(*names)
