"""Typed wrappers of msgpack, which is called only here.

The `_script` functions are for Redis's Lua library, which does not support the bin type: bytes and text are packed as
raw strings and unpacked as bytes.
"""

from collections.abc import Callable
from threading import local
from typing import Any, cast

import msgpack as untyped_msgpack  # pyright: ignore[reportMissingTypeStubs] (it ships none)

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
