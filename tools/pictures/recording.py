"""Run a command in a pseudo-terminal and record its output with times."""

import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

INCOMPLETE = re.compile(r"\x1b(\[[0-9;?]*)?$")
"""A control sequence of which a read has returned only the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The output of one command in a terminal of a fixed size."""

    rows: int
    columns: int
    output: tuple[tuple[float, str], ...]
    """Seconds since the start, and the text read then, with its control sequences."""


def record(command: Sequence[str], *, rows: int, columns: int) -> Recording:
    """Run a command and record its output.

    Raises:
        SystemExit: the command failed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
    started_s = time.monotonic()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = tuple((time.monotonic() - started_s, text) for text in _read(ours))
    if process.wait() != 0:
        raise SystemExit("".join(text for _, text in output))
    return Recording(rows=rows, columns=columns, output=output)


def _read(terminal: int) -> Iterator[str]:
    """Read until the last process has closed the terminal."""
    decoder, pending = codecs.getincrementaldecoder("utf-8")(), ""
    while True:
        try:
            data = os.read(terminal, 65_536)
        except OSError:  # Linux raises EIO where other systems return nothing
            return
        if not data:
            return
        text = pending + decoder.decode(data)
        cut = INCOMPLETE.search(text)
        pending = text[cut.start() :] if cut else ""
        yield text[: cut.start()] if cut else text
