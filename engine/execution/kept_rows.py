"""Which tokens of a step leave it as hidden states, because a prompt is read or a token is drawn. Knows no tensors."""

from typing import NamedTuple

from sluice.engine.batch import Batch, Read, ScheduledRow
from sluice.engine.execution.slots import Slot, Slots


class Part(NamedTuple):
    """Tokens of a row that are read: in the prompt, and in the hidden states that leave the step."""

    row: ScheduledRow
    read: Read
    start: int
    """Position of the first in the prompt."""

    first: int
    """Its row in the hidden states."""

    num_tokens: int


class KeptRows(NamedTuple):
    """Tokens of a step whose hidden states leave it."""

    rows: list[int]
    """Their numbers in the step, ascending."""

    drawn: list[int]
    """Those among `rows` that a token is drawn after, or a draft verified."""

    parts: list[Part]


def kept_rows(batch: Batch, slots: Slots) -> KeptRows:
    """Return the tokens of `batch`, without those of its padding, whose hidden states are needed."""
    kept = KeptRows([], [], [])
    offset = 0
    for row in batch.rows:
        slot = slots[row]
        num_drafts = len(batch.drafts.get(row.sequence_id, ()))
        end = offset + row.num_tokens + num_drafts
        read = batch.reads.get(row.sequence_id)
        positions = range(0) if read is None else _positions(row, read, slot.num_prompt_tokens)
        if read is not None and positions:
            kept.parts.append(Part(row, read, positions[0], len(kept.rows), len(positions)))
            kept.rows.extend(offset + position - row.start for position in positions)
        for token in range(end - 1 - num_drafts, end) if row.samples and draws(slot) else ():
            if not kept.rows or kept.rows[-1] != token:
                kept.rows.append(token)
            kept.drawn.append(len(kept.rows) - 1)
        offset = end
    return kept


def draws(slot: Slot) -> bool:
    """Return whether a sequence generates anything."""
    return slot.sampling.max_tokens > 0


def _positions(row: ScheduledRow, read: Read, num_prompt_tokens: int) -> range:
    """Return the positions of a row that are read."""
    end = min(row.start + row.num_tokens, num_prompt_tokens)
    if read.embed is None:
        # Each token but the first is predicted by the one before it.
        return range(row.start, min(end, num_prompt_tokens - 1))
    first = row.start if read.embed.pooling == "mean" else num_prompt_tokens - 1
    return range(max(row.start, first), end)
