"""Copies between host and device that wait for nothing: what a step needs goes, what it drew comes. Knows no model.

On a GPU both go through pinned memory. torch keeps such memory from being used again until the copies that were begun
from it, or to it, are over: that is the ring of buffers (an asynchronous copy reads its source when it runs, not when
it is asked for).
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """`array` on `device`. On the CPU it is the same memory; elsewhere `array` may be written again at once."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device_together(arrays: Sequence[NDArray[np.int32] | NDArray[np.float32]], device: torch.device) -> list[Tensor]:
    """`arrays` on `device`, by one copy; views of one memory, each aligned to 16 bytes as memory of its own would be.

    (Triton compiles anew for a pointer that is not.)
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


class Arrival:
    """Tensors on their way to the host."""

    def __init__(self, tensors: tuple[Tensor, ...], device: torch.device) -> None:
        """Begin to copy `tensors` from `device`, behind all that was launched there and before all that will be."""
        self._copies = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
        self._is_over: torch.cuda.Event | None = None
        if device.type != "cpu":
            # One that blocks sleeps; the others spin, and hold a lock of the driver.
            self._is_over = torch.cuda.Event(blocking=True)
            self._is_over.record(torch.cuda.current_stream(device))

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, on the host."""
        if self._is_over is not None:
            self._is_over.synchronize()
        return self._copies
