"""Copies of mapped weights to a device: while one piece is on its way, the next one is read from the file.

A mapped tensor is read where its bytes are touched, and a copy out of unpinned memory waits for the device. So pieces
go through a ring of pinned buffers: the host reads the file into one while the device takes what is in the others.
Nothing else of a weight is ever in the host's memory, and on the device it lies at its final place at once.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

BUFFER_BYTES = 32 * 2**20
"""A piece: long beside the cost of a copy, short beside a weight."""

NUM_BUFFERS = 3
"""One is read into, one is on its way, and one waits behind it."""


class Sent(Protocol):
    """A copy that was begun."""

    def synchronize(self) -> None:
        """Wait until its source may be written again."""
        ...


Send = Callable[[Tensor, Tensor], Sent]
"""Begin to copy a piece (in a buffer) to its place; in order with all that is asked of the device later."""


class WeightCopier:
    """Copies weights to a device through a ring of buffers. Changes with each copy; `finish` ends the last."""

    def __init__(
        self, send: Send, *, is_pinned: bool, buffer_bytes: int = BUFFER_BYTES, num_buffers: int = NUM_BUFFERS
    ) -> None:
        self._send = send
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(num_buffers)]
        self._in_use: list[Sent | None] = [None] * num_buffers
        self._next = 0

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Begin to copy `source`, contiguous and mapped, to `out`, contiguous and of the same shape, in its dtype."""
        pieces, places = source.reshape(-1), out.view(-1)
        piece_size = self._buffers[0].numel() // source.element_size()
        for start in range(0, pieces.numel(), piece_size):
            piece = pieces[start : start + piece_size]
            buffer = self._free_buffer()[: piece.numel() * piece.element_size()].view(piece.dtype)
            buffer.copy_(piece)
            self._in_use[self._next] = self._send(buffer, places[start : start + piece_size])
            self._next = (self._next + 1) % len(self._buffers)

    def finish(self) -> None:
        """Wait for all copies, and give the buffers back."""
        for sent in self._in_use:
            if sent is not None:
                sent.synchronize()
        self._in_use, self._buffers = [], []

    def _free_buffer(self) -> Tensor:
        # A copy reads its source when it runs, not when it is asked for: what is in a buffer stays until then.
        if (sent := self._in_use[self._next]) is not None:
            sent.synchronize()
        return self._buffers[self._next]


def copier_to(device: torch.device) -> WeightCopier | None:
    """What copies weights to `device`; None for the CPU, where mapped tensors are used as they are."""
    return None if device.type == "cpu" else WeightCopier(_send_to_gpu, is_pinned=True)


def _send_to_gpu(piece: Tensor, place: Tensor) -> Sent:
    # Of another dtype it goes as it is and is changed there: the host would have to wait for it otherwise.
    on_device = piece if piece.dtype == place.dtype else piece.to(place.device, non_blocking=True)
    place.copy_(on_device, non_blocking=True)
    sent = torch.cuda.Event(blocking=True)
    sent.record(torch.cuda.current_stream(place.device))
    return sent
