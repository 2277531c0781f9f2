"""Rows of a step whose logits change before a token is drawn: by biases, bans and penalties.

Only these rows are copied to float32. What stays the same while the rows do is on the device already: a step sends no
more than the tokens that penalties count.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sluice.engine.batch import Drafts, ScheduledRow
from sluice.engine.execution.sampling.seen_tokens import SeenTokens
from sluice.engine.execution.slots import Slot
from sluice.engine.execution.transfers import to_device
from sluice.engine.request import Sampling
from sluice.kernels.float_rows import float_rows
from sluice.kernels.penalties import Penalties, apply_penalties


class Edit(NamedTuple):
    """A row of a step that is edited."""

    row: int
    is_early: bool
    """Whether its output is shorter than `min_tokens`: tokens that would end it are banned."""


class LastTokens(NamedTuple):
    """Tokens that the step before has drawn."""

    rows: dict[int, int]
    """By sequence id: its row there."""

    token_ids: Tensor | None
    """`[R]` int64, on the device; None before the first step."""


NO_TOKENS = LastTokens({}, None)


def first_rows(sampling: list[ScheduledRow], drafts: Drafts) -> dict[int, int]:
    """Return, by sequence id, the row that sampled after its last known token."""
    if not drafts:
        return {row.sequence_id: number for number, row in enumerate(sampling)}
    first, rows = 0, dict[int, int]()
    for row in sampling:
        rows[row.sequence_id] = first
        first += 1 + len(drafts.get(row.sequence_id, ()))
    return rows


def edits_at(rows: Items[int], slots: Items[Slot], positions: Items[int]) -> tuple[Edit, ...]:
    """Return which of `rows` are edited when each row of a step draws the token at its position of its output."""
    edits = [Edit(row, positions[row] < slots[row].sampling.min_tokens) for row in rows]
    return tuple(
        edit
        for edit in edits
        if edit.is_early or (params := slots[edit.row].sampling).has_penalties or params.logit_bias
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedRows:
    """The edited rows of a step, and the edits of their logits."""

    slots: Items[Slot]
    rows: Tensor
    """`[E]` int64: rows of the step's logits."""

    copied: Tensor | None
    """`[E, V]` float32, for the copies of each step; None on a GPU. Fresh memory would be mapped page by page."""

    biases: tuple[Tensor, Tensor, Tensor] | None
    """Row among these, token id (both int64) and bias (float32, -inf for a ban) of each; a token at most once a row."""

    penalised: tuple[int, ...]
    """Those among these with penalties."""

    places: Tensor
    """`[E]` int32: their places in the counts of seen tokens; -1 without penalties."""

    strengths: tuple[Tensor, Tensor, Tensor]
    """Repetition, frequency and presence penalty, `[E]` float32."""

    def of(self, logits: Tensor) -> Tensor:
        """Return a copy of these rows of `logits`, with biases: `[E, V]` float32, valid until the next call."""
        edited = float_rows(logits, self.rows, out=self.copied)
        if self.biases is not None:
            rows, token_ids, values = self.biases
            edited[rows, token_ids] += values
        return edited


def edited_rows(
    slots: Items[Slot], edits: Items[Edit], seen: SeenTokens, eos_token_ids: frozenset[int], device: torch.device
) -> EditedRows:
    """Send `edits`, of rows with these slots, to the device."""
    params = [slot.sampling for slot in slots]
    biased = [
        (number, token, bias)
        for number, (edit, one) in enumerate(zip(edits, params, strict=True))
        for token, bias in _biases(one, eos_token_ids, is_early=edit.is_early)
        if 0 <= token < seen.table.shape[1]
    ]

    def on_device(numbers: Items[float], dtype: type[np.generic] = np.float32) -> Tensor:
        return to_device(np.array(numbers, dtype=dtype), device)

    def of_biases() -> tuple[Tensor, Tensor, Tensor]:
        numbers, token_ids, values = zip(*biased, strict=True)
        return on_device(numbers, np.int64), on_device(token_ids, np.int64), on_device(values)

    return EditedRows(
        slots=slots,
        rows=on_device([edit.row for edit in edits], np.int64),
        copied=torch.empty(len(edits), seen.table.shape[1]) if device.type == "cpu" else None,
        biases=of_biases() if biased else None,
        penalised=tuple(number for number, sampling in enumerate(params) if sampling.has_penalties),
        places=on_device([seen.place_of(slot) if slot.sampling.has_penalties else -1 for slot in slots], np.int32),
        strengths=(
            on_device([sampling.repetition_penalty for sampling in params]),
            on_device([sampling.frequency_penalty for sampling in params]),
            on_device([sampling.presence_penalty for sampling in params]),
        ),
    )


def _biases(params: Sampling, eos_token_ids: frozenset[int], *, is_early: bool) -> Iterator[tuple[int, float]]:
    bans = {*params.stop_token_ids, *params.eos_token_ids(eos_token_ids)} if is_early else frozenset[int]()
    yield from ((token, bias) for token, bias in params.logit_bias.items() if token not in bans)
    yield from ((token, -float("inf")) for token in sorted(bans))


def penalise(
    edited: Tensor,
    rows: EditedRows,
    positions: Items[int],
    drafts: Items[tuple[int, ...]],
    seen: SeenTokens,
    last: LastTokens,
) -> None:
    """Apply the penalties of a step to its edited rows.

    Args:
        edited: `[E, V]` float32, changed.
        rows: their edits.
        positions: of each row in its output.
        drafts: the tokens before each row's own that are guesses.
        seen: counts the tokens before those, as far as the host has them. It may lack the last one.
        last: has the others.
    """
    ends = [
        slot.num_prompt_tokens + position - len(guesses)
        for slot, position, guesses in zip(rows.slots, positions, drafts, strict=True)
    ]
    # Several rows may be of one sequence.
    seen.count({rows.slots[number].index: (rows.slots[number], ends[number]) for number in rows.penalised}.values())
    repetition, frequency, presence = rows.strengths
    penalties = Penalties(
        seen=seen.table,
        places=rows.places,
        extras=_extras(rows, ends, drafts, last),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
        listed=seen.listed,
    )
    apply_penalties(edited, penalties)


def _extras(rows: EditedRows, ends: Items[int], drafts: Items[tuple[int, ...]], last: LastTokens) -> Tensor:
    """Return `Penalties.extras`: drafts, or else the token that only the device has."""
    num_rows, device = len(rows.slots), rows.places.device
    if last.token_ids is None and not any(drafts):
        return rows.places.new_empty(num_rows, 0)
    sources = np.full(num_rows, -1, dtype=np.int64)
    for number in rows.penalised:
        if len(rows.slots[number].token_ids) < ends[number]:
            sources[number] = last.rows[rows.slots[number].sequence_id]
    guessed = np.full((num_rows, max(map(len, drafts))), -1, dtype=np.int32)
    for number in rows.penalised:
        guessed[number, : len(drafts[number])] = drafts[number]
    extras = to_device(guessed, device)
    if last.token_ids is None or (sources < 0).all():
        return extras
    at = to_device(sources, device)
    fed = torch.where(at < 0, -1, last.token_ids.index_select(0, at.clamp(min=0))).int()
    return torch.cat((extras, fed[:, None]), dim=1)
