"""Read a GGUF's header: metadata and the places of tensors. The file is believed in nothing.

Every length, offset and count is compared with what is left of the file before anything is allocated for it.
Versions 2 and 3 of the format, little-endian.
"""

import mmap
import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeAlias, TypeVar

from sluice.engine.errors import ModelFolderError
from sluice.engine.gguf.types import BLOCKS, TensorType, type_name

SUFFIX = ".gguf"
_T = TypeVar("_T")
Value: TypeAlias = "bool | int | float | str | list[str] | array[int] | array[float]"
"""Of a metadata field: arrays of numbers stay packed."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""Formats of number types, of `struct` and `array` alike."""

_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where a tensor is, and its form."""

    type: TensorType
    shape: tuple[int, ...]
    """As in torch: the last dimension is contiguous."""

    offset: int
    """Of its first byte in the file."""

    num_bytes: int

    def part(self, index: int) -> "TensorInfo":
        """Return one of the tensors that this one stacks."""
        size = self.num_bytes // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * size, num_bytes=size)

    def half(self, index: int) -> "TensorInfo":
        """Return the first or the second half of its rows, whose number is even."""
        size = self.num_bytes // 2
        rows = (self.shape[0] // 2, *self.shape[1:])
        return replace(self, shape=rows, offset=self.offset + index * size, num_bytes=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A file's header."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    header_bytes: int
    """Before the tensors."""


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF that `path` is or, without a config.json, the only one in the folder `path`; None without one.

    Raises:
        ModelFolderError: there are several.
    """
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    # A projector of images is a file beside that of the text model.
    found = sorted(each for each in path.glob(f"*{SUFFIX}") if not each.name.startswith("mmproj"))
    if len(found) > 1:
        raise ModelFolderError(f"{path} has {len(found)} GGUF files: give one, such as {found[0]}.")
    return found[0] if found else None


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file.

    Raises:
        ModelFolderError: it cannot be read, is no GGUF, or is damaged.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _read(path, _Cursor(content))
    except (_DamagedError, OSError, ValueError) as error:
        raise ModelFolderError(f"{path} cannot be read as GGUF: {error}.") from error


class _DamagedError(Exception):
    """The file contradicts itself; says how."""


class _Cursor:
    """A place in the file, which moves as it is read."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.size = len(content)
        self.at = 0

    def take(self, num_bytes: int, what: str) -> int:
        """Move over bytes; return where they begin."""
        if num_bytes > self.size - self.at:
            raise _DamagedError(f"{what} at byte {self.at} would end after the file, which has {self.size} bytes")
        start, self.at = self.at, self.at + num_bytes
        return start

    def number(self, code: str, what: str) -> int | float:
        """Read one number."""
        start = self.take(struct.calcsize(f"<{code}"), what)
        return struct.unpack_from(f"<{code}", self._content, start)[0]

    def whole(self, code: str, what: str) -> int:
        """Read a whole number."""
        return int(self.number(code, what))

    def text(self, what: str) -> str:
        """Read a length and as many bytes of UTF-8."""
        start = self.take(self.whole("Q", what), what)
        try:
            return self._content[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise _DamagedError(f"{what} at byte {start} is not UTF-8") from error

    def numbers(self, code: str, count: int, what: str) -> "array[int] | array[float]":
        """Read `count` numbers, packed."""
        values: array[int] | array[float] = array(code)
        start = self.take(count * values.itemsize, what)
        values.frombytes(self._content[start : self.at])
        return values


def _read(path: Path, cursor: _Cursor) -> GgufFile:
    _check_start(cursor)
    num_tensors, num_fields = cursor.whole("Q", "the number of tensors"), cursor.whole("Q", "the number of fields")
    metadata = _fields(cursor, num_fields, lambda what: _value(cursor, cursor.whole("I", what), what))
    infos = _fields(cursor, num_tensors, lambda what: _tensor(cursor, what))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= cursor.size or alignment & (alignment - 1):
        raise _DamagedError(f"general.alignment must be a power of two within the file, got {alignment!r}")
    header_bytes = -(-cursor.at // alignment) * alignment
    tensors = {name: _placed(cursor, name, header_bytes, *info) for name, info in infos.items()}
    return GgufFile(path=path, metadata=metadata, tensors=tensors, header_bytes=header_bytes)


def _check_start(cursor: _Cursor) -> None:
    magic = cursor.whole("I", "the magic number").to_bytes(4, "little")
    if magic != _MAGIC:
        raise _DamagedError(f"it begins with {magic!r}, not with {_MAGIC!r}")
    version = cursor.whole("I", "the version")
    if version & 0xFFFF == 0:
        raise _DamagedError("it is big-endian; convert it with gguf's gguf-convert-endian")
    if version not in _VERSIONS:
        raise _DamagedError(f"it has version {version}; 2 and 3 are supported")


def _fields(cursor: _Cursor, count: int, read: Callable[[str], _T]) -> dict[str, _T]:
    """Read `count` named entries."""
    found: dict[str, _T] = {}
    for _ in range(count):
        name = cursor.text("a name")
        if name in found:
            raise _DamagedError(f"{name!r} is there twice")
        found[name] = read(repr(name))
    return found


def _value(cursor: _Cursor, kind: int, what: str) -> Value:
    if kind == _STRING:
        return cursor.text(what)
    if kind == _ARRAY:
        return _array(cursor, what)
    if kind == _BOOL:
        return cursor.whole("B", what) != 0
    if kind not in _NUMBERS:
        raise _DamagedError(f"{what} has the unknown type {kind}")
    return cursor.number(_NUMBERS[kind], what)


def _array(cursor: _Cursor, what: str) -> Value:
    kind, count = cursor.whole("I", what), cursor.whole("Q", what)
    if kind == _STRING:
        # The loop ends at the end of the file, whatever the count: each string has a length.
        return [cursor.text(what) for _ in range(count)]
    if kind == _BOOL:
        return cursor.numbers("B", count, what)
    if kind not in _NUMBERS:
        raise _DamagedError(f"{what} is an array of the unsupported type {kind}")
    return cursor.numbers(_NUMBERS[kind], count, what)


def _tensor(cursor: _Cursor, what: str) -> tuple[tuple[int, ...], int, int]:
    """Read the shape, the type and the offset of a tensor."""
    num_dimensions = cursor.whole("I", what)
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        raise _DamagedError(f"the tensor {what} has {num_dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are supported")
    shape = tuple(cursor.whole("Q", what) for _ in range(num_dimensions))[::-1]
    return shape, cursor.whole("I", what), cursor.whole("Q", what)


def _placed(cursor: _Cursor, name: str, start: int, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
    """Check that a tensor lies in the file."""
    if kind not in BLOCKS:
        known = ", ".join(each.name for each in TensorType)
        raise _DamagedError(f"the tensor {name!r} is {type_name(kind)}, which is not one of {known}")
    type_of, (block_size, block_bytes) = TensorType(kind), BLOCKS[TensorType(kind)]
    if shape[-1] % block_size or not all(shape):
        raise _DamagedError(f"the tensor {name!r} is {shape}, which {type_of.name} cannot hold")
    num_bytes = prod(shape) // block_size * block_bytes
    if start + offset + num_bytes > cursor.size:
        raise _DamagedError(
            f"the tensor {name!r} needs {num_bytes} bytes from byte {start + offset} on, but the file has "
            f"{cursor.size}: it is cut short or damaged"
        )
    return TensorInfo(type=type_of, shape=shape, offset=start + offset, num_bytes=num_bytes)
