"""Asynchronous copies between host and device: a step's inputs and its samples. Knows no model.

On a GPU both go through pinned memory. An asynchronous copy reads its source when it runs, not when it is requested:
the arrays that a step sends are gathered in one of a few slots in turn (`Staging`); torch keeps the memory of other
copies itself.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

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


class _Slot(NamedTuple):
    """Pinned memory, and when the last copy from it will have completed."""

    tensor: Tensor
    array: NDArray[np.int32]
    """The same memory."""

    is_over: "torch.cuda.Event | None"


class Staging:
    """Pinned memory from which arrays are copied to a device, one copy for all of them.

    Slots are used in turn, so that the host fills one while the device may still read another.
    """

    NUM_SLOTS = 3

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: deque[_Slot] = deque()

    def send(self, arrays: Sequence[NDArray[np.int32]]) -> list[Tensor]:
        """Copy `arrays` to new memory on the device; return them there (see `places`)."""
        shapes = [array.shape for array in arrays]
        slot, num_words = self._packed(arrays, shapes)
        moved = slot.tensor[:num_words].to(self._device, non_blocking=True, copy=True)
        self._mark(slot)
        return views(moved, shapes)

    def fill(self, target: Tensor, arrays: Sequence[NDArray[np.int32]]) -> None:
        """Copy `arrays` to their places in `target`, after all work launched on the device."""
        slot, num_words = self._packed(arrays, [array.shape for array in arrays])
        target[:num_words].copy_(slot.tensor[:num_words], non_blocking=True)
        self._mark(slot)

    def _packed(self, arrays: Sequence[NDArray[np.int32]], shapes: Sequence[tuple[int, ...]]) -> tuple[_Slot, int]:
        """Return a slot with the arrays at their places, and their words."""
        starts, num_words = places(shapes)
        slot = self._next(num_words)
        for array, start in zip(arrays, starts, strict=True):
            # Through the shape: a strided array is copied once.
            slot.array[start : start + array.size].reshape(array.shape)[...] = array
        return slot, num_words

    def copy(self, words: NDArray[np.int32], target: Tensor) -> None:
        """Copy `words` to `target`, which has their size, after all work launched on the device."""
        slot = self._next(words.size)
        slot.array[: words.size] = words
        target.copy_(slot.tensor[: words.size], non_blocking=True)
        self._mark(slot)

    def _next(self, num_words: int) -> _Slot:
        """Return a slot of this size or more whose last copy has completed."""
        if len(self._slots) < self.NUM_SLOTS or len(self._slots[0].array) < num_words:
            if len(self._slots) == self.NUM_SLOTS:
                self._slots.popleft()
            return self._make(max(1, num_words))
        slot = self._slots.popleft()
        if slot.is_over is not None:
            slot.is_over.synchronize()
        return slot

    def _make(self, num_words: int) -> _Slot:
        # Half as much again: a step's arrays grow slowly.
        tensor = torch.zeros(num_words + num_words // 2, dtype=torch.int32, pin_memory=self._is_cuda)
        return _Slot(tensor, tensor.numpy(), torch.cuda.Event() if self._is_cuda else None)

    def _mark(self, slot: _Slot) -> None:
        if slot.is_over is not None:
            slot.is_over.record(torch.cuda.current_stream(self._device))
        self._slots.append(slot)

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"


def places(shapes: Iterable[tuple[int, ...]]) -> tuple[list[int], int]:
    """Return where arrays of these shapes begin in one memory, each aligned to 16 bytes, and its words.

    Triton compiles a separate kernel for unaligned pointers.
    """
    *starts, num_words = accumulate((-(-prod(shape) // 4) * 4 for shape in shapes), initial=0)
    return starts, num_words


def views(words: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the arrays of these shapes in `words`, contiguous each."""
    starts, _ = places(shapes)
    return [words[start : start + prod(shape)].view(shape) for start, shape in zip(starts, shapes, strict=True)]


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
