"""Processor time of processes and threads from /proc: the cost of a run, independent of other load."""

import os
from collections import Counter
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


def threads_s(pid: int) -> Counter[str]:
    """Return the seconds that the running threads of a process have used, by their names; exact to a microsecond."""
    total_s: Counter[str] = Counter()
    for folder in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, used_ns = (folder / "comm").read_text().strip(), int((folder / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
        total_s["main" if folder.name == str(pid) else name] += used_ns / 1e9
    return total_s


def children_of(pid: int) -> list[int]:
    """Return the processes that a process started and that still run."""
    found = (folder.read_text().split() for folder in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for children in found for child in children]


def _stat(folder: Path) -> list[str]:
    return (folder / "stat").read_text().rpartition(")")[2].split()
