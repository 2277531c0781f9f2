"""The one place where msgpack is called, with types. Knows no message.

The `_script` pair speaks what Redis's Lua library speaks: it does not know msgpack's bin type, so bytes and text go
out as the same raw strings and come back as bytes.
"""

from collections.abc import Callable
from threading import local
from typing import Any, cast

import msgpack as untyped_msgpack  # pyright: ignore[reportMissingTypeStubs] (it ships none)

msgpack: Any = untyped_msgpack  # Any: so its names are taken at the word of its documentation, by the casts below


class _Packers(local):
    """A thread's own packers: kept, because making one costs as much as packing an entry does."""

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
    """Pack what a script unpacks: bytes and text alike become raw strings. No integer may exceed 2^53."""
    return _packers.pack_raw(value)


def unpack_from_script(data: bytes) -> Any:  # noqa: ANN401 (Any: as above)
    """Unpack what a script packed: every string comes back as bytes."""
    return msgpack.unpackb(data, raw=True, strict_map_key=False)
