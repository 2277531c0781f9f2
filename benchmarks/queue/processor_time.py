"""Processor time of processes from /proc: the cost of a run, independent of other load."""

import os
from pathlib import Path

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_GROUP, _FIRST_TIME, _NUM_TIMES = 2, 11, 4
"""Fields of /proc/PID/stat after the name: process group; own user and system time, and that of ended children."""


def process_s(pid: int) -> float:
    """Return the seconds that a process has used, with all its threads and ended children."""
    return sum(map(int, _stat(Path(f"/proc/{pid}"))[_FIRST_TIME : _FIRST_TIME + _NUM_TIMES])) / CLOCK_TICKS


def group_s(group: int) -> float:
    """Return the seconds that the processes of a group have used; ended ones count through their parent."""
    total_s = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(_stat(folder)[_GROUP]) == group:
                total_s += process_s(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total_s


def _stat(folder: Path) -> list[str]:
    return (folder / "stat").read_text().rpartition(")")[2].split()
