"""Copy memory-mapped weights to a device while the next piece is read from the file.

A mapped tensor is read where its bytes are touched, and a copy from unpinned memory blocks on the device. So pieces go
through a ring of pinned buffers: the host reads the file into one buffer while the device copies the others. No other
part of a weight is ever in host memory, and on the device each weight is written directly to its final place.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

BUFFER_BYTES = 32 * 2**20
"""Size of a piece: large compared with the overhead of a copy, small compared with a weight."""

NUM_BUFFERS = 3
"""One is read into, one is being copied, and one is queued."""


class PendingTransfer(Protocol):
    """A copy that was started."""

    def synchronize(self) -> None:
        """Wait until its source may be overwritten."""
        ...


Send = Callable[[Tensor, Tensor], PendingTransfer]
"""Start copying a piece (in a buffer) to its place, in order with all later work of the device."""


class WeightCopier:
    """A copier of weights to a device, through a ring of buffers. `finish` completes the last copies."""

    def __init__(
        self, send: Send, *, is_pinned: bool, buffer_bytes: int = BUFFER_BYTES, num_buffers: int = NUM_BUFFERS
    ) -> None:
        self._send = send
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(num_buffers)]
        self._in_use: list[PendingTransfer | None] = [None] * num_buffers
        self._next = 0

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Start copying `source`, mapped, to `out`, of the same shape, in its dtype. Both are contiguous."""
        pieces, places = source.reshape(-1), out.view(-1)
        piece_size = self._buffers[0].numel() // source.element_size()
        for start in range(0, pieces.numel(), piece_size):
            piece = pieces[start : start + piece_size]
            buffer = self._free_buffer()[: piece.numel() * piece.element_size()].view(piece.dtype)
            buffer.copy_(piece)
            self._in_use[self._next] = self._send(buffer, places[start : start + piece_size])
            self._next = (self._next + 1) % len(self._buffers)

    def finish(self) -> None:
        """Wait for all copies, and free the buffers."""
        for transfer in self._in_use:
            if transfer is not None:
                transfer.synchronize()
        self._in_use, self._buffers = [], []

    def _free_buffer(self) -> Tensor:
        # A copy reads its source when it runs, not when it is requested: keep a buffer unchanged until then.
        if (transfer := self._in_use[self._next]) is not None:
            transfer.synchronize()
        return self._buffers[self._next]


def copier_to(device: torch.device) -> WeightCopier | None:
    """Return a copier to `device`; None for the CPU, where mapped tensors are used in place."""
    return None if device.type == "cpu" else WeightCopier(_send_to_gpu, is_pinned=True)


def _send_to_gpu(piece: Tensor, place: Tensor) -> PendingTransfer:
    # Convert the dtype on the device: otherwise the host would have to wait.
    on_device = piece if piece.dtype == place.dtype else piece.to(place.device, non_blocking=True)
    place.copy_(on_device, non_blocking=True)
    transfer = torch.cuda.Event(blocking=True)
    transfer.record(torch.cuda.current_stream(place.device))
    return transfer
