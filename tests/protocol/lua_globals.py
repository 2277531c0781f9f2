"""Read which global variables a Lua script names, from its bytecode. The server compiles it."""

import struct
from collections.abc import Iterator
from typing import Any

COMPILE = "return string.dump(loadstring(ARGV[1]))"
HEADER = b"\x1bLuaQ\x00\x01\x04\x08\x04\x08\x00"
"""Lua 5.1, little-endian; sizes of int, size_t, instruction and number; numbers are floats."""

GETGLOBAL, SETGLOBAL = 5, 7

Constant = bytes | bool | float | None


def globals_of(client: Any, source: str) -> tuple[set[str], set[str]]:  # Any: a redis-py client
    """Return the names of the globals that a script reads, and of those that it writes."""
    bytecode = _Bytecode(client.eval(COMPILE, 0, source))
    read, written = set[str](), set[str]()
    for operation, name in bytecode.function():
        (read if operation == GETGLOBAL else written).add(name)
    return read, written


class _Bytecode:
    """What `string.dump` returned, as in luac's `ldump.c`. Changes: each read moves on."""

    def __init__(self, dumped: bytes) -> None:
        assert dumped.startswith(HEADER), dumped[: len(HEADER)]
        self._left = memoryview(dumped)[len(HEADER) :]

    def function(self) -> Iterator[tuple[int, str]]:
        """Yield each operation on a global, with its name, in a function and in those inside it."""
        self._text()  # its source
        self._read("<ii4B")
        code, constants = self._ints(), [self._constant() for _ in range(self._int())]
        for instruction in code:
            if (operation := instruction & 0x3F) in (GETGLOBAL, SETGLOBAL):
                name = constants[instruction >> 14]
                assert isinstance(name, bytes)
                yield operation, name.decode()
        for _ in range(self._int()):
            yield from self.function()
        self._skip_debug_information()

    def _skip_debug_information(self) -> None:
        self._ints()  # line of each instruction
        for _ in range(self._int()):
            self._text()  # name of a local
            self._read("<ii")
        for _ in range(self._int()):
            self._text()  # name of an upvalue

    def _read(self, layout: str) -> tuple[Any, ...]:  # Any: as the layout says
        size = struct.calcsize(layout)
        found, self._left = struct.unpack(layout, self._left[:size]), self._left[size:]
        return found

    def _int(self) -> int:
        return self._read("<i")[0]

    def _ints(self) -> tuple[int, ...]:
        return self._read(f"<{self._int()}I")

    def _text(self) -> bytes:
        (size,) = self._read("<Q")
        return self._read(f"<{size}s")[0][:-1]

    def _constant(self) -> Constant:
        (kind,) = self._read("<B")
        match kind:
            case 0:
                return None
            case 1:
                return self._read("<?")[0]
            case 3:
                return self._read("<d")[0]
            case _:
                return self._text()
