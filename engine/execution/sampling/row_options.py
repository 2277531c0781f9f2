"""Sampling options of a step's rows, and the tokens drawn with them, at fixed addresses on the device.

A recorded step reads and writes them there. They reach the device in one copy a step, whatever has changed. The rows
that are drawn from edited logits have theirs a second time, after all rows.
"""

from collections.abc import Iterable
from struct import Struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice.engine.execution.slots import Slot
from sluice.engine.execution.transfers import Staging
from sluice.kernels.philox import counter_2
from sluice.kernels.sample import SampleOptions, sample

_LEAST_TEMPERATURE = 1e-5
_PACKED = Struct("<Qqfffi")
_FIELDS = np.dtype(
    [
        # Written with its 64 bits unsigned, read as the same bits.
        ("seed", np.int64),
        ("counter_2", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
    ]
)
_NAMES = ("seed", "counter_2", "temperature", "top_p", "min_p", "top_k")
_WORDS = 9
"""Of four bytes, for each row: those of `_FIELDS`, and the position."""


class RowOptions:
    """Options of up to `max_rows` rows. Overwritten by each step."""

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        # Each field begins at a multiple of 16 bytes, and so do its second half's.
        self._num_rows = -(-max_rows // 4) * 4
        self._vocab_size = vocab_size
        self._words = np.zeros(_WORDS * 2 * self._num_rows, dtype=np.int32)
        host = _split(torch.from_numpy(self._words))
        self._fields: dict[str, NDArray[np.generic]] = {name: getattr(host, name).numpy() for name in _NAMES}
        self._positions: NDArray[np.int32] = host.position.numpy()
        self._staging = Staging(device) if device.type != "cpu" else None
        self._on_device = torch.from_numpy(self._words).to(device)
        self._options = _split(self._on_device)
        self.drawn = torch.zeros(self._num_rows, dtype=torch.int64, device=device)
        """The tokens that `draw`, or a replay of it, drew last."""

    def fill(self, slots: Iterable[Slot]) -> NDArray[np.int32]:
        """Set the rows to these slots' options; return the array of positions, to be written before each `send`."""
        positions = self._fill(slots, 0)
        # A recorded step draws for more rows: an argmax is the cheapest.
        self._fields["temperature"][len(positions) : self._num_rows] = 0.0
        return positions

    def fill_edited(self, slots: Iterable[Slot]) -> NDArray[np.int32]:
        """Set the edited rows to these slots' options, as `fill`."""
        return self._fill(slots, self._num_rows)

    def _fill(self, slots: Iterable[Slot], first: int) -> NDArray[np.int32]:
        packed = b"".join([slot.options or self._pack(slot) for slot in slots])
        rows = np.frombuffer(packed, dtype=_FIELDS)
        end = first + len(rows)
        for name in _NAMES:
            self._fields[name][first:end] = rows[name]
        return self._positions[first:end]

    def _pack(self, slot: Slot) -> bytes:
        params = slot.sampling
        # A temperature too small to divide by selects the most likely token.
        temperature = params.temperature if params.temperature >= _LEAST_TEMPERATURE else 0.0
        top_k = min(params.top_k, self._vocab_size)
        slot.options = _PACKED.pack(params.seed, counter_2(slot.choice), temperature, params.top_p, params.min_p, top_k)
        return slot.options

    def send(self) -> None:
        """Copy the options to the device, after all work launched there."""
        if self._staging is not None:
            self._staging.copy(self._words, self._on_device)

    def draw(self, logits: Tensor) -> None:
        """Draw from `logits` `[R, V]` with the first R rows to `drawn`. It may be recorded."""
        num_rows = logits.shape[0]
        sample(logits, self.first(num_rows), out=self.drawn[:num_rows])

    def first(self, num_rows: int, *, has_filters: bool = True) -> SampleOptions:
        """Return the device's options of the first rows; `has_filters` as in `SampleOptions`."""
        return self._part(slice(num_rows), has_filters)

    def edited(self, num_rows: int, *, has_filters: bool = True) -> SampleOptions:
        """Return those of the first edited rows."""
        return self._part(slice(self._num_rows, self._num_rows + num_rows), has_filters)

    def _part(self, rows: slice, has_filters: bool) -> SampleOptions:
        options = self._options
        return SampleOptions(
            temperature=options.temperature[rows],
            top_k=options.top_k[rows],
            top_p=options.top_p[rows],
            min_p=options.min_p[rows],
            seed=options.seed[rows],
            position=options.position[rows],
            counter_2=options.counter_2[rows],
            has_filters=has_filters,
        )


def _split(words: Tensor) -> SampleOptions:
    """Return the fields of all rows, as views of `words`; the wide ones first, for their alignment."""
    seed, counter, *narrow = words.split([2 * (count := len(words) // _WORDS), 2 * count, *[count] * 5])
    temperature, top_p, min_p, top_k, position = narrow
    return SampleOptions(
        temperature=temperature.view(torch.float32),
        top_k=top_k,
        top_p=top_p.view(torch.float32),
        min_p=min_p.view(torch.float32),
        seed=seed.view(torch.int64),
        position=position,
        counter_2=counter.view(torch.int64),
    )
