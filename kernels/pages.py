"""Memory for large tensors with scattered access (the KV cache, prepared weights), and giving freed memory back."""

import contextlib
import ctypes
import math
import mmap

import torch
from torch import Tensor


def free_heap_pages() -> None:
    """Return the pages of freed memory that the C library keeps to the system; without glibc, do nothing."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros; on the CPU in pages that take memory only once they are written.

    `torch.zeros` writes every byte: 1.5 s per GiB, most of which is rarely used. Huge pages, if available, reduce TLB
    misses.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private: few systems use huge pages for shareable memory.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
