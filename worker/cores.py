"""Cores of this host shared among worker processes, so that none waits for another's threads."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def own_cores(topology: Path = _TOPOLOGY) -> list[int]:
    """The cores that this process may use, neighbours side by side: hyperthreads of a core, cores of a socket."""
    return sorted(os.sched_getaffinity(0), key=lambda core: _place(topology / f"cpu{core}" / "topology", core))


def share_cores(cores: Sequence[int], count: int) -> list[frozenset[int]]:
    """Divide `cores` among `count` processes, each a run of neighbours; all of them each where there are too few."""
    if len(cores) < count:
        return [frozenset(cores)] * count
    edges = [len(cores) * index // count for index in range(count + 1)]
    return [frozenset(cores[edges[index] : edges[index + 1]]) for index in range(count)]


@contextmanager
def on_cores(cores: frozenset[int]) -> Generator[None]:
    """Processes that this thread starts meanwhile get these cores; none: those that it has itself."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _place(topology: Path, core: int) -> tuple[int, int, int]:
    """(socket, core, thread); where the kernel does not say, the thread's number alone."""
    try:
        socket, physical = [int((topology / name).read_text()) for name in ("physical_package_id", "core_id")]
    except (OSError, ValueError):
        return 0, 0, core
    return socket, physical, core
