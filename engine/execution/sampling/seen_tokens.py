"""Tokens that sequences with penalties have seen, counted on the device. Knows no sampling.

A count has the tokens that the host knows: those of steps that have succeeded. So a step that fails or is divided
leaves no trace here, and may be launched again. A token that only the device knows yet is added to the row of the step
that needs it (`Penalties.extras`).
"""

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice.engine.execution.slots import Slot
from sluice.engine.execution.transfers import to_device


class SeenTokens:
    """Counts by place, for `Penalties.seen`. Mutable. A row slot gets a place with its first sequence with penalties.

    The first one allocates the table with a place for each sequence that a step may have, so a step never takes more
    memory here than the largest step that was measured, though a device that lags has more row slots. If all places are
    taken, the least recently used slot loses its own. A sequence that comes back is counted again.
    """

    def __init__(self, vocab_size: int, device: torch.device, max_places: int) -> None:
        self._device = device
        self._max_places = max_places
        self._places: dict[int, int] = {}
        """By row slot, the least recently used first."""

        self.table = torch.empty(0, vocab_size, dtype=torch.int32, device=device)
        """`[P, V]`; a place is undefined before its sequence is counted."""

        self._lists: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
        """On the CPU, `Penalties.listed`."""

    def place_of(self, slot: Slot) -> int:
        """Return the row of `table` for a sequence with penalties."""
        place = self._places.pop(slot.index, None)
        if place is None:
            place = self._next_place()
            slot.num_counted = 0
        self._places[slot.index] = place
        return place

    def count(self, sequences: Collection[tuple[Slot, int]]) -> None:
        """Count the known tokens of sequences with penalties, of each up to an end (exclusive)."""
        added: list[tuple[int, int]] = []
        for slot, end in sequences:
            place = self.place_of(slot)
            if not 0 < slot.num_counted <= end:
                self._begin(slot)
            added += [(place, token) for token in slot.token_ids[slot.num_counted : end]]
        if added:
            self._add(added)
        # Only now: if one of them could not be counted, none was.
        for slot, end in sequences:
            slot.num_counted = max(slot.num_counted, min(end, len(slot.token_ids)))

    @property
    def listed(self) -> tuple[Tensor, Tensor] | None:
        """See `Penalties.listed`; None on a GPU, which reads all counts at once."""
        return None if self._lists is None else (torch.from_numpy(self._lists[0]), torch.from_numpy(self._lists[1]))

    def _add(self, added: list[tuple[int, int]]) -> None:
        """Count tokens of outputs, each with its place."""
        if self._lists is None:
            vocab_size = self.table.shape[1]
            at = to_device(np.array([place * vocab_size + token for place, token in added], np.int64), self._device)
            self.table.view(-1).scatter_add_(0, at, torch.full_like(at, 2, dtype=torch.int32))
            return
        # A step brings a token of each sequence: operators of torch would take longer than the loop.
        (tokens, lengths), counts = self._lists, self.table.numpy()
        for place, token in added:
            if not counts[place, token]:
                tokens[place, lengths[place]] = token
                lengths[place] += 1
            counts[place, token] += 2

    def _begin(self, slot: Slot) -> None:
        """Count the prompt of a sequence, in the place of any other that had its row slot."""
        prompt = np.unique(np.array(slot.token_ids[: slot.num_prompt_tokens], dtype=np.int64))
        place = self.place_of(slot)
        if self._lists is None:
            self.table[place].zero_().index_fill_(0, to_device(prompt, self._device), 1)
        else:
            counts = self.table.numpy()[place]
            counts[:] = 0
            counts[prompt] = 1
            tokens, lengths = self._lists
            tokens[place, : len(prompt)], lengths[place] = prompt, len(prompt)
        slot.num_counted = slot.num_prompt_tokens

    def _next_place(self) -> int:
        if not len(self.table):
            self.table = self.table.new_empty(self._max_places, self.table.shape[1])
            if self._device.type == "cpu":
                # Memory that no token fills is not real.
                lengths = np.zeros(self._max_places, dtype=np.int32)
                self._lists = np.empty(self.table.shape, dtype=np.int32), lengths
        if len(self._places) < self._max_places:
            return len(self._places)
        return self._places.pop(next(iter(self._places)))
