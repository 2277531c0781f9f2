"""Memory of the device: how much is free, the peak of a computation, and returning it."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch

from sluice.engine.execution.cgroups import cgroup_folders
from sluice.kernels.pages import free_heap_pages

_VERSION_2 = (("memory.max", "memory.high"), "memory.current")
"""The files of a cgroup's limits and usage in version 2. Beyond `high` it is throttled."""

_VERSION_1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Value for clear_refs that resets the peak resident size (proc(5))."""


def free_memory_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Return the free memory of the device; on the CPU, of the machine below `root`, within the process's cgroups."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return max(0, min([_free_of_machine(root), *_rooms_of_cgroups(root)]))


def _free_of_machine(root: Path) -> int:
    try:
        return _fields(root / "proc/meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _rooms_of_cgroups(root: Path) -> Iterator[int]:
    """Yield the memory that each cgroup may still take."""
    for is_version_2, folder in cgroup_folders(root, "memory"):
        limits, usage = _VERSION_2 if is_version_2 else _VERSION_1
        for limit in limits:
            with suppress(OSError, ValueError):  # no such file; "max"
                num_used = int((folder / usage).read_text()) - _reclaimable_bytes(folder / "memory.stat")
                yield int((folder / limit).read_text()) - num_used


def _reclaimable_bytes(statistics: Path) -> int:
    """Return the page cache that a cgroup counts as used, but gives up when memory is needed.

    Of what was read more than once, half, as Linux does for MemAvailable: some of it would be read again at once.
    """
    try:
        fields = _fields(statistics)
    except OSError:
        return 0
    # In version 1, only the total includes the cgroups below.
    inactive, active = (fields.get(f"total_{name}", fields.get(name, 0)) for name in ("inactive_file", "active_file"))
    return inactive + active // 2


def _fields(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    return {name: int(number) for name, number, *_ in map(str.split, path.read_text().splitlines())}


def give_memory_back(device: torch.device) -> None:
    """Return cached memory that torch (on the CPU, the C library) does not use to the device."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    else:
        free_heap_pages()


def peak_bytes(device: torch.device, compute: Callable[[], object]) -> int:
    """Run `compute`; return the peak of the memory that it took beyond what was in use.

    The figure includes memory that stays in use (libraries, compiled kernels). On the CPU it is the process's resident
    memory.

    Raises:
        OSError: on the CPU, if the kernel does not provide the figure.
    """
    if device.type == "cuda":
        return _peak_on_gpu(device, compute)
    give_memory_back(device)
    before = _status_bytes("VmRSS")
    _CLEAR_REFS.write_text(_RESET_PEAK)
    compute()
    return max(0, _status_bytes("VmHWM") - before)


def _peak_on_gpu(device: torch.device, compute: Callable[[], object]) -> int:
    give_memory_back(device)
    torch.cuda.synchronize(device)
    free, reserved = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    compute()
    torch.cuda.synchronize(device)
    # By torch: its reserved peak, since reserved pieces that are unused are not available to others either.
    by_torch = torch.cuda.max_memory_reserved(device) - reserved
    # By others (libraries, compiled kernels): memory that is gone now and is not torch's. It stays in use.
    missing = free - torch.cuda.mem_get_info(device)[0]
    by_others = missing - (torch.cuda.memory_reserved(device) - reserved)
    give_memory_back(device)
    return max(0, by_torch) + max(0, by_others)


def _status_bytes(name: str) -> int:
    """Return a field of this process's status, in bytes."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii").splitlines() if ":" in line)
    if name not in lines:
        raise OSError(f"{_STATUS} has no {name}")
    return int(lines[name].split()[0]) * 1024
