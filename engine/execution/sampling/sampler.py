"""Sample the next token of each sequence. Tokens depend only on the sequence, not on state kept here.

Order: masks, logit bias and bans (min_tokens), then penalties, of the rows that have any; then `kernels.sample`
(greedy, or temperature, filters, noise). Log-probabilities are those of the logits before any of it.

Hot: masks change the logits themselves; only those of edited rows are copied, and with
masks those of rows with log-probabilities. `sample` does not wait; the only wait for the device is `Drawn.collect`.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice.engine.batch import Sampled, without_token
from sluice.engine.execution.sampling.edited_rows import (
    NO_TOKENS,
    Edit,
    EditedRows,
    LastTokens,
    edited_rows,
    edits_at,
    penalise,
)
from sluice.engine.execution.sampling.row_options import RowOptions
from sluice.engine.execution.sampling.seen_tokens import SeenTokens
from sluice.engine.execution.slots import Slot
from sluice.engine.execution.transfers import PendingCopy, to_device
from sluice.engine.request import SampledLogprobs
from sluice.kernels.float_rows import float_rows
from sluice.kernels.logprobs import logprobs
from sluice.kernels.sample import draws_with
from sluice.kernels.token_masks import apply_token_masks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """State that stays the same while the rows of a step do: usually the next step has the same rows."""

    slots: Items[Slot]
    draw: Callable[[Tensor], Tensor]
    """Computed from their logits."""

    positions: NDArray[np.int32]
    """Each row's offset in its output: on the host, rewritten in each step."""

    editable: tuple[int, ...]
    """Rows with a bias, a ban or a penalty, at any position."""

    has_logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edited:
    """State that stays the same while the edited rows do."""

    edits: tuple[Edit, ...]
    rows: EditedRows
    draw: Callable[[Tensor], Tensor]
    """Computed from their edited logits."""

    positions: NDArray[np.int32]
    """As in `_Rows`."""


class PreparedRows(NamedTuple):
    """The rows of a step that is about to be launched; each samples a token."""

    slots: Items[Slot]
    positions: list[int]
    """Each row's offset in its output."""

    rows: _Rows
    drafts: Items[tuple[int, ...]]
    """For each row, the drafts between the known tokens of its slot and its own; empty if no row has any."""

    edited: _Edited | None
    """None if no logits are edited."""


def with_drafts(
    slots: Items[Slot], positions: Items[int], drafts: Items[tuple[int, ...]]
) -> tuple[list[Slot], list[int], list[tuple[int, ...]]]:
    """Return the rows of a step with a row more for each draft: the arguments of `Sampler.prepare`."""
    parts = [
        (slot, position + count, guesses[:count])
        for slot, position, guesses in zip(slots, positions, drafts, strict=True)
        for count in range(1 + len(guesses))
    ]
    return [slot for slot, _, _ in parts], [position for _, position, _ in parts], [before for _, _, before in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The sampled tokens of a step that may still be running: a `Launched`."""

    token_ids: Tensor
    """`[R]` int64, on the device; -1 where a row has no token. Valid until the step after the next is launched."""

    positions: list[int]
    """Each row's offset in its output."""

    num_asked: dict[int, int]
    """Rows whose log-probabilities are requested, with the number of alternatives."""

    pending_copy: PendingCopy
    """Token ids; if requested, also log-probabilities of the tokens, and of the most likely ones with their ids."""

    def collect(self) -> list[Sampled]:
        """Wait for the tokens: one `Sampled` per row; a row without a finite logit has an error instead of a token."""
        arrived = self.pending_copy.wait()
        token_ids: list[int] = arrived[0].tolist()
        of_rows = _logprobs(self.num_asked, *arrived[1:]) if self.num_asked else {}
        return [
            Sampled((token,), of_rows.get(row)) if token >= 0 else without_token(self.positions[row])
            for row, token in enumerate(token_ids)
        ]


def _logprobs(
    num_asked: dict[int, int], chosen: Tensor, values: Tensor, token_ids: Tensor
) -> dict[int, tuple[SampledLogprobs]]:
    """Return the log-probabilities of each requested row, from `[A, 1]`, `[A, K]` and `[A, K]`."""
    of_chosen: list[list[float]] = chosen.tolist()
    pairs = zip(num_asked.items(), of_chosen, values.tolist(), token_ids.tolist(), strict=True)
    return {
        row: (SampledLogprobs(value[0], tuple(zip(ids[:number], likeliest, strict=False))),)
        for (row, number), value, likeliest, ids in pairs
    }


class Sampler:
    """A sampler of tokens for the rows of a step."""

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_rows: int,
        max_sequences: int,
        device: torch.device,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._seen = SeenTokens(vocab_size, device, max_places=max_sequences)
        self._rows: _Rows | None = None
        self._edited: _Edited | None = None
        self.options = RowOptions(max_rows=max_rows, vocab_size=vocab_size, device=device)
        """Of the rows of the step last prepared: a recorded step draws with them."""

    def prepare(
        self,
        slots: Items[Slot],
        positions: list[int],
        drafts: Items[tuple[int, ...]] = (),
    ) -> PreparedRows:
        """Send the options of a step's rows to the device, before the step is launched.

        Args:
            slots: of the rows, each of which samples.
            positions: offset in its output of the token that each row samples. The last token before it may be known
                only to the device.
            drafts: see `PreparedRows`.
        """
        if self._rows is None or slots != self._rows.slots:
            self._rows, self._edited = self._make_rows(slots), None
        self._rows.positions[:] = positions
        edited = self._prepare_edits(self._rows, positions) if self._rows.editable else None
        self.options.send()
        return PreparedRows(slots, positions, self._rows, drafts, edited)

    def _send_masks(self, masks: Mapping[int, bytes]) -> tuple[Tensor, Tensor]:
        """Return on the device `[M]` int64, the rows that have a mask, and `[M, W]` int32, these masks."""
        words = np.frombuffer(b"".join(masks.values()), dtype="<i4").reshape(len(masks), -1)
        rows = np.array(list(masks), dtype=np.int64)
        return to_device(rows, self._device), to_device(words.astype(np.int32), self._device)

    def sample(
        self,
        logits: Tensor,
        prepared: PreparedRows,
        *,
        last: LastTokens = NO_TOKENS,
        drawn: Tensor | None = None,
        masks: Mapping[int, bytes] | None = None,
    ) -> Drawn:
        """Sample one token for each row of the step prepared last.

        Args:
            logits: `[R, V]`, a row per sequence. Changed where there are masks, and not needed afterwards.
            prepared: the rows.
            last: tokens of the step before, of which the host may have none yet.
            drawn: `[R]`, tokens that the step has drawn from these logits, unedited.
            masks: by row, the tokens that it may sample, see `engine.batch.Masks`.
        """
        slots, positions, rows, _, edited = prepared
        num_asked = _num_asked(slots) if rows.has_logprobs else {}
        asked = to_device(np.array(list(num_asked), dtype=np.int64), self._device) if num_asked else None
        unmasked = None
        if masks:
            unmasked = float_rows(logits, asked) if asked is not None else None
            apply_token_masks(logits, *self._send_masks(masks))
            drawn = None
        if edited is not None and len(edited.edits) == len(slots):
            token_ids = self._draw_edited(logits, prepared, edited, last)
        else:
            token_ids = rows.draw(logits) if drawn is None else drawn
            if edited is not None:
                token_ids.index_copy_(0, edited.rows.rows, self._draw_edited(logits, prepared, edited, last))
        measured = ()
        if asked is not None:
            # Rows without a token are discarded, so any valid index will do.
            chosen, count = token_ids.index_select(0, asked).clamp(min=0), max(num_asked.values())
            if unmasked is not None:
                measured = logprobs(unmasked, chosen, count=count)
            else:
                measured = logprobs(logits, chosen, count=count, rows=asked)
        return Drawn(
            token_ids=token_ids,
            positions=positions,
            num_asked=num_asked,
            pending_copy=PendingCopy((token_ids, *measured), self._device),
        )

    def _make_rows(self, slots: Items[Slot]) -> _Rows:
        params = [slot.sampling for slot in slots]
        return _Rows(
            slots=slots,
            positions=self.options.fill(slots),
            draw=draws_with(self.options.first(len(slots), has_filters=_has_filters(slots))),
            editable=tuple(row for row, p in enumerate(params) if p.logit_bias or p.min_tokens or p.has_penalties),
            has_logprobs=any(p.logprobs is not None for p in params),
        )

    def _prepare_edits(self, rows: _Rows, positions: list[int]) -> _Edited | None:
        edits = edits_at(rows.editable, rows.slots, positions)
        if not edits:
            return None
        if self._edited is None or edits != self._edited.edits:
            self._edited = self._make_edited(rows.slots, edits)
        self._edited.positions[:] = [positions[edit.row] for edit in edits]
        return self._edited

    def _make_edited(self, slots: Items[Slot], edits: tuple[Edit, ...]) -> _Edited:
        of_rows = [slots[edit.row] for edit in edits]
        options = self.options.edited(len(edits), has_filters=_has_filters(of_rows))
        return _Edited(
            edits=edits,
            rows=edited_rows(of_rows, edits, self._seen, self._eos_token_ids, self._device),
            draw=draws_with(options),
            positions=self.options.fill_edited(of_rows),
        )

    def _draw_edited(self, logits: Tensor, prepared: PreparedRows, edited: _Edited, last: LastTokens) -> Tensor:
        """Return the tokens of the edited rows, `[E]`."""
        changed = edited.rows.of(logits)
        if edited.rows.penalised:
            positions = [prepared.positions[edit.row] for edit in edited.edits]
            drafts = [prepared.drafts[edit.row] if prepared.drafts else () for edit in edited.edits]
            penalise(changed, edited.rows, positions, drafts, self._seen, last)
        return edited.draw(changed)


def _has_filters(slots: Items[Slot]) -> bool:
    params = [slot.sampling for slot in slots]
    return any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params)


def _num_asked(slots: Items[Slot]) -> dict[int, int]:
    """Return the rows whose log-probabilities are requested, with the number of alternatives."""
    return {row: slot.sampling.logprobs for row, slot in enumerate(slots) if slot.sampling.logprobs is not None}
