"""Asynchronous copies between host and device: a step's inputs and its samples. Knows no model.

On a GPU both go through pinned memory. torch does not reuse pinned memory before the copies from it, or to it, have
completed, so no ring of buffers is needed (an asynchronous copy reads its source when it runs, not when it is
requested).
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy `array` to `device`. On the CPU the memory is shared; elsewhere `array` may be overwritten at once."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device_together(arrays: Sequence[NDArray[np.int32] | NDArray[np.float32]], device: torch.device) -> list[Tensor]:
    """Copy `arrays` to `device` in one copy; return views of one memory, each aligned to 16 bytes.

    Triton compiles a separate kernel for unaligned pointers.
    """
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    together = np.zeros(sum(sizes), dtype=np.int32)
    starts = np.cumsum([0, *sizes])
    for array, start in zip(arrays, starts, strict=False):
        together[start : start + array.size] = array.ravel().view(np.int32)
    moved = to_device(together, device)
    pairs = zip(arrays, starts.tolist(), strict=False)
    return [
        moved[start : start + array.size].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, start in pairs
    ]


class PendingCopy:
    """Tensors being copied to the host."""

    def __init__(self, tensors: tuple[Tensor, ...], device: torch.device) -> None:
        """Start copying `tensors` from `device`, after all work launched there and before all later work."""
        self._copies = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
        self._is_over: torch.cuda.Event | None = None
        if device.type != "cpu":
            # A blocking event sleeps; others spin, and hold a lock of the driver.
            self._is_over = torch.cuda.Event(blocking=True)
            self._is_over.record(torch.cuda.current_stream(device))

    def wait(self) -> tuple[Tensor, ...]:
        """Return the tensors, on the host."""
        if self._is_over is not None:
            self._is_over.synchronize()
        return self._copies
