"""Draw tokens in a worker of vLLM by our own sampler, so that they depend on the sequence alone. Knows no vLLM."""

from collections.abc import Collection
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.engine.execution.sampling.sampler import Drawn, Sampler
from sluice.engine.execution.slots import Slot
from sluice.worker.engines.vllm.orders import Drawing, Draws

NO_TOKEN = -1
"""The token of a row without a finite logit."""


class Row(NamedTuple):
    """A sequence of a step, as a worker of vLLM has it."""

    id: str
    drawing: Drawing
    prompt: list[int]
    output: list[int]
    """What was drawn since it was new. vLLM appends to it."""


class DrawnRows(NamedTuple):
    """What was drawn of the rows of a step."""

    rows: list[int]
    """Those of which a token was drawn."""

    drawn: Drawn
    """Theirs."""


class RowSampler:
    """A sampler of the rows of a step. Mutable: it keeps their sequences, with the counts of their tokens."""

    def __init__(self, *, vocab_size: int, eos_token_ids: frozenset[int], max_rows: int, device: torch.device) -> None:
        self._sampler = Sampler(
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            max_rows=max_rows,
            max_sequences=max_rows,
            device=device,
        )
        self._slots: dict[str, Slot] = {}

    def draw(self, logits: Tensor, rows: Items[Row], draws: Draws) -> DrawnRows | None:
        """Draw from `[R, V]` logits, a row per sequence; None if nothing is to be drawn."""
        numbers = [number for number, row in enumerate(rows) if row.id in draws.sequences]
        if not numbers:
            return None
        ids = [rows[number].id for number in numbers]
        slots = [self._slot(rows[number]) for number in numbers]
        masks = {number: draws.masks[name] for number, name in enumerate(ids) if name in draws.masks}
        positions = [len(slot.token_ids) - slot.num_prompt_tokens for slot in slots]
        if len(numbers) < len(rows):
            logits = logits[numbers]
        return DrawnRows(numbers, self._sampler.sample(logits, self._sampler.prepare(slots, positions), masks=masks))

    def keep(self, ids: Collection[str]) -> None:
        """Forget all sequences but these."""
        if len(self._slots) > len(ids):
            self._slots = {name: slot for name, slot in self._slots.items() if name in ids}

    def _slot(self, row: Row) -> Slot:
        slot = self._slots.get(row.id)
        if slot is None:
            drawing = row.drawing
            self._slots[row.id] = slot = Slot(
                index=drawing.slot,
                sequence_id=drawing.sequence_id,
                choice=drawing.choice,
                sampling=drawing.sampling,
                num_prompt_tokens=drawing.num_prompt_tokens,
                token_ids=list(row.prompt),
                num_blocks=0,
            )
        slot.token_ids.extend(row.output[len(slot.token_ids) - len(row.prompt) :])
        return slot
