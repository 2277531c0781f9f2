"""Locks on the files of a bulk run: one process at a time. The kernel releases them when the process ends."""

import fcntl
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from sluice.protocol.errors import ProducerError


class FileInUse(ProducerError):
    """Another process uses a file of the run."""


def lock(file: IO[str], name: str, holder: str = "another process") -> None:
    """Lock an open file until it is closed.

    Raises:
        FileInUse: the process `holder` has locked it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        message = f"{holder} uses {name}. Wait until it ends, then run the same command again."
        raise FileInUse(message) from error


def lock_file(path: Path, name: str) -> IO[str]:
    """Open a lock file, lock it, and write this process into it.

    Raises:
        FileInUse: as `lock`; the message names the other process.
    """
    with ExitStack() as on_failure:
        file = on_failure.enter_context(open(path, "a+", opener=private))  # Path.open takes no opener
        file.seek(0)
        lock(file, name, file.read() or "another process")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        on_failure.pop_all()
    return file


def private(path: str, flags: int) -> int:
    """Open a file that only its user may read; for `open(opener=…)`."""
    return os.open(path, flags, 0o600)
