"""Memory of the device that computes: what is free, what a computation takes at most, what can be given back."""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What clear_refs is told to forget the highest resident size so far (proc(5))."""


def free_memory_bytes(device: torch.device) -> int:
    """Memory that nothing uses now, on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def give_memory_back(device: torch.device) -> None:
    """Return to the device what torch, or on the CPU the C library, keeps of it and nothing uses."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
        trim(0)


def peak_bytes(device: torch.device, compute: Callable[[], object]) -> int:
    """Run `compute`; the most memory that it took of the device at once, beyond what was taken before, and what it
    leaves taken (libraries, compiled kernels) included.

    On the CPU by the process's resident memory.

    Raises:
        OSError: on the CPU, where the kernel does not say.
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
    # By torch: what it had reserved at most, for pieces that are not used cannot be had by others either.
    by_torch = torch.cuda.max_memory_reserved(device) - reserved
    # By others (libraries, compiled kernels): all that is missing now and is not torch's. That stays.
    missing = free - torch.cuda.mem_get_info(device)[0]
    by_others = missing - (torch.cuda.memory_reserved(device) - reserved)
    give_memory_back(device)
    return max(0, by_torch) + max(0, by_others)


def _status_bytes(name: str) -> int:
    """A field of this process's status, which is in kB."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii").splitlines() if ":" in line)
    if name not in lines:
        raise OSError(f"{_STATUS} has no {name}")
    return int(lines[name].split()[0]) * 1024
