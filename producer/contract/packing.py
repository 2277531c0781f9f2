"""Typed wrappers of msgpack, which is called only here, and checks of the types that it unpacked.

The `_script` functions are for Redis's Lua library, which does not support the bin type: bytes and text are packed as
raw strings and unpacked as bytes.
"""

from collections.abc import Callable
from threading import local
from typing import Any, cast

import msgpack as untyped_msgpack  # pyright: ignore[reportMissingTypeStubs] (it ships none)

from sluice.producer.contract.errors import WireError

msgpack: Any = untyped_msgpack  # Any: it has no types; the casts below follow its documentation


class _Packers(local):
    """Packers per thread. They are kept, because creating one costs as much as packing an entry."""

    def __init__(self) -> None:
        self.pack = cast("Callable[[object], bytes]", msgpack.Packer().pack)
        self.pack_raw = cast("Callable[[object], bytes]", msgpack.Packer(use_bin_type=False).pack)


_packers = _Packers()


def pack(value: object) -> bytes:
    """Pack a message.

    Raises:
        ValueError: text that is not UTF-8 (UnicodeEncodeError).
        OverflowError: a number that needs more than 64 bits.
    """
    return _packers.pack(value)


def unpack(data: bytes) -> Any:  # noqa: ANN401 (Any: as above)
    """Unpack a message.

    Raises:
        ValueError: not msgpack, or nested too deeply.
        TypeError: a map whose key cannot be one.
    """
    return msgpack.unpackb(data, strict_map_key=False)


def pack_for_script(value: object) -> bytes:
    """Pack an argument of a script: bytes and text become raw strings. Integers must not exceed 2^53."""
    return _packers.pack_raw(value)


def unpack_from_script(data: bytes) -> Any:  # noqa: ANN401 (Any: as above)
    """Unpack a reply or event of a script: every string becomes bytes."""
    return msgpack.unpackb(data, raw=True, strict_map_key=False)


def as_int(value: object) -> int:
    """Return a whole number; raises WireError for another type, as the functions below do."""
    if type(value) is not int:
        raise WireError(f"expected a whole number, got {value!r}")
    return value


def as_float(value: object) -> float:
    """Return a number as a float."""
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
    """Return a list of whole numbers."""
    return tuple(map(as_int, as_list(value)))
