"""Divide the cores of this host among worker processes, so that their threads do not compete."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def own_cores(topology: Path = _TOPOLOGY) -> list[int]:
    """List the cores that this process may use, by socket, physical core and hyperthread."""
    return sorted(os.sched_getaffinity(0), key=lambda core: _place(topology / f"cpu{core}" / "topology", core))


def share_cores(cores: Sequence[int], count: int) -> list[frozenset[int]]:
    """Divide `cores` into `count` runs of neighbours. Each process gets all cores if there are fewer than processes."""
    if len(cores) < count:
        return [frozenset(cores)] * count
    edges = [len(cores) * index // count for index in range(count + 1)]
    return [frozenset(cores[edges[index] : edges[index + 1]]) for index in range(count)]


@contextmanager
def on_cores(cores: frozenset[int]) -> Generator[None]:
    """Pin processes that this thread starts inside the context to `cores`. An empty set keeps its own cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _place(topology: Path, core: int) -> tuple[int, int, int]:
    """Return (socket, core, thread). Socket and core are 0 where the kernel does not report them."""
    try:
        socket, physical = [int((topology / name).read_text()) for name in ("physical_package_id", "core_id")]
    except (OSError, ValueError):
        return 0, 0, core
    return socket, physical, core
