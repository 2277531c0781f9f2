"""Tokens that sequences with penalties have seen, counted on the device. Knows no sampling.

A count has the tokens that the host knows: those of steps that have succeeded. So a step that fails or is divided
leaves no trace here, and may be launched again. A token that only the device knows yet is added to the row of the step
that needs it (`Penalties.extras`).
"""

from collections.abc import Collection

import numpy as np
import torch

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
        added: list[int] = []
        vocab_size = self.table.shape[1]
        for slot, end in sequences:
            first = self.place_of(slot) * vocab_size
            if not 0 < slot.num_counted <= end:
                self._begin(slot)
            added += [first + token for token in slot.token_ids[slot.num_counted : end]]
        if added:
            at = to_device(np.array(added, dtype=np.int64), self._device)
            self.table.view(-1).scatter_add_(0, at, torch.full_like(at, 2, dtype=torch.int32))
        # Only now: if one of them could not be counted, none was.
        for slot, end in sequences:
            slot.num_counted = max(slot.num_counted, min(end, len(slot.token_ids)))

    def _begin(self, slot: Slot) -> None:
        """Count the prompt of a sequence, in the place of any other that had its row slot."""
        prompt = np.unique(np.array(slot.token_ids[: slot.num_prompt_tokens], dtype=np.int64))
        row = self.table[self.place_of(slot)]
        row.zero_()
        row.index_fill_(0, to_device(prompt, self._device), 1)
        slot.num_counted = slot.num_prompt_tokens

    def _next_place(self) -> int:
        if not len(self.table):
            self.table = self.table.new_empty(self._max_places, self.table.shape[1])
        if len(self._places) < self._max_places:
            return len(self._places)
        return self._places.pop(next(iter(self._places)))
