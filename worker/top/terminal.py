"""Keys from a terminal, as they are pressed."""

import os
import select
import sys
import termios
import tty
from collections.abc import Generator
from contextlib import contextmanager

_ESCAPE = b"\x1b"
_NAMED = {
    **dict.fromkeys((b"\x1b[A", b"\x1bOA"), "up"),
    **dict.fromkeys((b"\x1b[B", b"\x1bOB"), "down"),
    **dict.fromkeys((b"\r", b"\n"), "enter"),
    **dict.fromkeys((b"\x7f", b"\x08"), "backspace"),
    _ESCAPE: "escape",
}


class Keys:
    """The keys that are pressed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def next(self, timeout_s: float) -> str | None:
        """Return the next key by its name or character; None if there is none in time. A closed terminal is `q`."""
        if not self._rest:
            if not select.select([self._descriptor], [], [], timeout_s)[0]:
                return None
            self._rest = os.read(self._descriptor, 1024)
            if not self._rest:
                return "q"
        return self._take()

    def _take(self) -> str:
        for code, name in _NAMED.items():
            if self._rest == code or (self._rest.startswith(code) and code != _ESCAPE):
                self._rest = self._rest[len(code) :]
                return name
        if self._rest.startswith(_ESCAPE):
            self._rest = b""  # a key that means nothing here
            return ""
        for length in range(1, 5):
            try:
                key = self._rest[:length].decode()
            except UnicodeDecodeError:
                continue
            self._rest = self._rest[length:]
            return key
        self._rest = b""
        return ""


@contextmanager
def raw_keys() -> Generator[Keys]:
    """Read standard input key by key, without echo, until the end."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
