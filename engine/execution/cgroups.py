"""The cgroups that limit this process, of version 1 and 2, and the cores that they leave it. Imports no torch."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_MOUNT = "sys/fs/cgroup"


def cgroup_folders(root: Path, controller: str) -> Iterator[tuple[bool, Path]]:
    """Yield the cgroups of a controller, from this process's own up to the root of the mount.

    Returns:
        Whether it is of version 2, and its folder below `root`, which may not exist: in a container the path may be the
        host's, of which only the mount is there.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not path or (controllers and controller not in controllers.split(",")):
            continue
        mount = root / _MOUNT / (controller if controllers else "")
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            yield not controllers, mount / group.relative_to("/")


def num_usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may keep busy: those of its affinity, within the quotas of its cgroups.

    A part of a core is none: threads that wait for each other in a step are all stopped once the quota of a period (0.1
    s) is used up.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, _quotas_in_cores(root))]))


def _quotas_in_cores(root: Path) -> Iterator[float]:
    for is_version_2, folder in cgroup_folders(root, "cpu"):
        names = ("cpu.max",) if is_version_2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with suppress(OSError, ValueError):  # no such file; "max"
            quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            if quota > 0 and period > 0:  # -1 is none
                yield quota / period
