"""Sample the next token of each sequence. Tokens depend only on the sequence, not on state kept here.

Order: logit bias and bans (min_tokens), then penalties, in one launch for all rows; then `kernels.sample` (greedy, or
temperature, filters, noise). Log-probabilities are those of the logits before any of it.

Hot: rows that need only an argmax or a sample allocate no tensor. `sample` does not wait; the only wait
for the device is `Drawn.collect`.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice.engine.batch import Sampled
from sluice.engine.execution.sampling.row_options import RowOptions
from sluice.engine.execution.sampling.token_edits import TokenEdits, edits_of
from sluice.engine.execution.slots import Slot
from sluice.engine.execution.transfers import PendingCopy, Staging, to_device
from sluice.engine.request import TokenLogprobs
from sluice.kernels.penalties import Penalties, apply_penalties
from sluice.kernels.sample import draws_with

_NO_TOKEN = "the model's logits were not finite, or every token was masked, at output token {position}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """State that stays the same while the rows of a step do: usually the next step has the same rows."""

    slots: Items[Slot]
    draw: Callable[[Tensor], Tensor]
    """Computed from their logits."""

    positions: NDArray[np.int32]
    """Each row's offset in its output: on the host, rewritten in each step."""

    may_edit: bool
    """Whether some row has a bias, a ban or a penalty."""

    has_logprobs: bool


class PreparedRows(NamedTuple):
    """The rows of a step that is about to be launched; each samples a token."""

    slots: Items[Slot]
    positions: list[int]
    """Each row's offset in its output."""

    rows: _Rows


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
        logprobs = _logprobs(self.num_asked, *arrived[1:]) if self.num_asked else {}
        return [
            Sampled((token,), logprobs.get(row))
            if token >= 0
            else Sampled((), None, _NO_TOKEN.format(position=self.positions[row]))
            for row, token in enumerate(token_ids)
        ]


def _logprobs(
    num_asked: dict[int, int], chosen: Tensor, values: Tensor, token_ids: Tensor
) -> dict[int, tuple[TokenLogprobs]]:
    """Return the log-probabilities of each requested row, from `[A, 1]`, `[A, K]` and `[A, K]`."""
    of_chosen: list[list[float]] = chosen.tolist()
    pairs = zip(num_asked.items(), of_chosen, values.tolist(), token_ids.tolist(), strict=True)
    return {
        row: (TokenLogprobs(chosen=value[0], top=tuple(zip(ids[:number], likeliest, strict=False))),)
        for (row, number), value, likeliest, ids in pairs
    }


class Sampler:
    """A sampler of tokens for the rows of a step."""

    def __init__(self, *, vocab_size: int, eos_token_ids: frozenset[int], max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._staging = Staging(device)
        self._rows: _Rows | None = None
        self.options = RowOptions(max_rows=max_rows, vocab_size=vocab_size, device=device)
        """Of the rows of the step last prepared: a recorded step draws with them."""

    def prepare(self, slots: Items[Slot], positions: list[int]) -> PreparedRows:
        """Send the options of a step's rows to the device, before the step is launched.

        Args:
            slots: of the rows, each of which samples.
            positions: offset in its output of the token that each row samples. The last token before it may be known
                only to the device.
        """
        if self._rows is None or slots != self._rows.slots:
            self._rows = self._make_rows(slots)
        self._rows.positions[:] = positions
        self.options.send()
        return PreparedRows(slots, positions, self._rows)

    def sample(self, logits: Tensor, prepared: PreparedRows, *, drawn: Tensor | None = None) -> Drawn:
        """Sample one token for each row of the step prepared last.

        Args:
            logits: `[R, V]`, a row per sequence. Not changed, and not needed afterwards.
            prepared: the rows.
            drawn: `[R]`, tokens that the step has drawn from these logits, unedited.
        """
        slots, positions, rows = prepared
        edited = self._edit(logits, slots, positions) if rows.may_edit else logits
        token_ids = drawn if drawn is not None and edited is logits else rows.draw(edited)
        num_asked = _num_asked(slots) if rows.has_logprobs else {}
        logprobs = self._logprobs(logits, token_ids, num_asked) if num_asked else ()
        return Drawn(
            token_ids=token_ids,
            positions=positions,
            num_asked=num_asked,
            pending_copy=PendingCopy((token_ids, *logprobs), self._device),
        )

    def _make_rows(self, slots: Items[Slot]) -> _Rows:
        params = [slot.sampling for slot in slots]
        has_filters = any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params)
        return _Rows(
            slots=slots,
            positions=self.options.fill(slots),
            draw=draws_with(self.options.first(len(slots), has_filters=has_filters)),
            may_edit=any(p.logit_bias or p.min_tokens or p.has_penalties for p in params),
            has_logprobs=any(p.logprobs is not None for p in params),
        )

    def _edit(self, logits: Tensor, slots: Items[Slot], positions: list[int]) -> Tensor:
        """Return `logits` with biases, bans and penalties; the same tensor if no row has any."""
        edits = {
            row: edit for row, slot in enumerate(slots) if (edit := self._edits_of(slot, positions[row])).token_ids
        }
        if not edits:
            return logits
        edited = logits.to(torch.float32, copy=True)
        apply_penalties(edited, self._penalties(edits, slots, positions))
        return edited

    def _edits_of(self, slot: Slot, position: int) -> TokenEdits:
        return edits_of(slot, position, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)

    def _penalties(self, edits: dict[int, TokenEdits], slots: Items[Slot], positions: list[int]) -> Penalties:
        """Return entries of the rows with `edits`, concatenated; on the device by one copy."""
        of_rows, params = list(edits.values()), [slots[row].sampling for row in edits]
        is_early = [positions[row] < p.min_tokens for row, p in zip(edits, params, strict=True)]
        lengths = [len(one.token_ids) for one in of_rows]

        def spread(values: list[float]) -> NDArray[np.float32]:
            return np.repeat(np.array(values, dtype=np.float32), lengths)

        def joined(parts: "Items[array[float]]") -> NDArray[np.float32]:
            return np.concatenate([np.frombuffer(part, dtype=np.float32) for part in parts])

        arrays = (
            np.repeat(np.array(list(edits), dtype=np.int32), lengths),
            np.concatenate([np.frombuffer(one.token_ids, dtype=np.int32) for one in of_rows]),
            joined([e.early_biases if early else e.biases for e, early in zip(of_rows, is_early, strict=True)]),
            joined([one.repetition for one in of_rows]),
            joined([one.counts for one in of_rows]),
            spread([p.frequency_penalty for p in params]),
            spread([p.presence_penalty for p in params]),
        )
        rows, token_ids, bias, repetition, counts, frequency, presence = self._staging.send(arrays)
        return Penalties(
            rows=rows,
            token_ids=token_ids,
            bias=bias,
            repetition=repetition,
            counts=counts,
            frequency=frequency,
            presence=presence,
        )

    def _logprobs(self, logits: Tensor, token_ids: Tensor, num_asked: dict[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of requested rows: `[A, 1]` of their tokens, `[A, K]` of the likeliest, and ids."""
        rows = to_device(np.array(list(num_asked), dtype=np.int64), self._device)
        raw = logits.index_select(0, rows).float()  # [A, V]
        normaliser = raw.logsumexp(dim=-1, keepdim=True)  # [A, 1]
        # Rows without a token are discarded, so any valid index will do.
        chosen = raw.gather(1, token_ids.index_select(0, rows).clamp(min=0)[:, None]) - normaliser
        top = (raw - normaliser).topk(max(num_asked.values()), dim=-1)
        return chosen, top.values, top.indices


def _num_asked(slots: Items[Slot]) -> dict[int, int]:
    """Return the rows whose log-probabilities are requested, with the number of alternatives."""
    return {row: slot.sampling.logprobs for row, slot in enumerate(slots) if slot.sampling.logprobs is not None}
