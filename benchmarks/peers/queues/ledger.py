"""The job of every peer: append its name and the time to a file, in one write of 24 bytes.

It costs a microsecond or two, needs no server, survives SIGKILL, and shows afterwards which jobs ran, how often, and
when: CLOCK_MONOTONIC is the same in every process of a machine.
"""

import os
import struct
import time

NAME_CHARS = 16
RECORD = struct.Struct(f"<{NAME_CHARS}sq")
PATH = os.environ.get("PEER_LEDGER", "")
URL = os.environ.get("PEER_REDIS_URL", "")
_file = os.open(PATH, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if PATH else -1


def record(name: str) -> None:
    """Record that the job of this name has run."""
    os.write(_file, RECORD.pack(name.encode(), time.monotonic_ns()))
