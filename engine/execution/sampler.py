"""Sample the next token of each sequence. Tokens depend only on the sequence, not on state kept here.

Order: logit bias and bans (min_tokens), then penalties, in one launch for all rows; then `kernels.sample` (greedy, or
temperature, filters, noise). Log-probabilities are those of the logits before any of it.

Hot: rows that need only an argmax or a sample allocate no tensor. `sample` does not wait; the only wait
for the device is `Drawn.collect`.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice.engine.batch import Sampled, ScheduledSequence
from sluice.engine.execution.row_options import RowOptions
from sluice.engine.execution.transfers import PendingCopy, Staging, to_device
from sluice.engine.request import SamplingParams, TokenLogprobs
from sluice.engine.sequence import Sequence
from sluice.kernels.penalties import NO_BIAS, Penalties, apply_penalties
from sluice.kernels.sample import draws_with

_NO_TOKEN = "the model's logits were not finite, or every token was masked, at output token {position}"


@dataclass(slots=True, eq=False)
class _EditedTokens:
    """Tokens of one sequence whose logits change, each once, with their changes. Grows with the tokens seen."""

    index: dict[int, int] = field(default_factory=dict[int, int])
    # Arrays, since each step reads all of them: of int32 and float32.
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    biases: "array[float]" = field(default_factory=lambda: array("f"))
    early_biases: "array[float]" = field(default_factory=lambda: array("f"))
    """Biases while the output is shorter than `min_tokens`: tokens that would end it are banned."""

    repetition: "array[float]" = field(default_factory=lambda: array("f"))
    """1 until the token is seen."""

    counts: "array[float]" = field(default_factory=lambda: array("f"))
    """Occurrences in the output."""

    num_counted: int = 0

    def entry(self, token: int) -> int:
        """Return the index of `token`, adding it without changes if it is new."""
        at = self.index.setdefault(token, len(self.token_ids))
        if at == len(self.token_ids):
            self.token_ids.append(token)
            self.biases.append(NO_BIAS)
            self.early_biases.append(NO_BIAS)
            self.repetition.append(1.0)
            self.counts.append(0.0)
        return at

    def see(self, sequence: Sequence) -> None:
        """Count the tokens that arrived since the last call."""
        for position in range(self.num_counted, len(sequence.token_ids)):
            at = self.entry(sequence.token_ids[position])
            self.counts[at] += position >= sequence.num_prompt_tokens
            self.repetition[at] = sequence.sampling.repetition_penalty
        self.num_counted = len(sequence.token_ids)


_NO_EDITS = _EditedTokens()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """State that stays the same while the rows of a step do: usually the next step has the same rows."""

    sequence_ids: tuple[int, ...]
    draw: Callable[[Tensor], Tensor]
    """Computed from their logits."""

    positions: NDArray[np.int32]
    """Each row's offset in its output: on the host, rewritten in each step."""

    may_edit: bool
    """Whether some row has a bias, a ban or a penalty."""

    has_logprobs: bool


class PreparedRows(NamedTuple):
    """The rows of a step that is about to be launched; each samples a token."""

    sequences: Items[Sequence]
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
        self._edits: dict[int, _EditedTokens] = {}
        self._rows: _Rows | None = None
        self.options = RowOptions(max_rows=max_rows, vocab_size=vocab_size, device=device)
        """Of the rows of the step last prepared: a recorded step draws with them."""

    def prepare(self, scheduled: Items[ScheduledSequence]) -> PreparedRows:
        """Send the options of a step's rows, each of which samples, to the device, before the step is launched."""
        sequences = [row.sequence for row in scheduled]
        # Computed from `start`, not from `token_ids`: the last token may be known only to the device.
        positions = [start + num_tokens - s.num_prompt_tokens for s, start, num_tokens, _ in scheduled]
        ids = tuple([sequence.id for sequence in sequences])
        if self._rows is None or ids != self._rows.sequence_ids:
            self._rows = self._make_rows(ids, sequences)
        self._rows.positions[:] = positions
        self.options.send()
        return PreparedRows(sequences, positions, self._rows)

    def sample(self, logits: Tensor, prepared: PreparedRows, *, drawn: Tensor | None = None) -> Drawn:
        """Sample one token for each row of the step prepared last.

        Args:
            logits: `[R, V]`, a row per sequence. Not changed, and not needed afterwards.
            prepared: the rows.
            drawn: `[R]`, tokens that the step has drawn from these logits, unedited.
        """
        sequences, positions, rows = prepared
        edited = self._edit(logits, sequences, positions) if rows.may_edit else logits
        token_ids = drawn if drawn is not None and edited is logits else rows.draw(edited)
        num_asked = _num_asked(sequences) if rows.has_logprobs else {}
        logprobs = self._logprobs(logits, token_ids, num_asked) if num_asked else ()
        return Drawn(
            token_ids=token_ids,
            positions=positions,
            num_asked=num_asked,
            pending_copy=PendingCopy((token_ids, *logprobs), self._device),
        )

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drop state kept for ended sequences: their ids may come again, from another engine."""
        self._rows = None
        for sequence_id in sequence_ids:
            self._edits.pop(sequence_id, None)
            self.options.forget(sequence_id)

    def _make_rows(self, ids: tuple[int, ...], sequences: Items[Sequence]) -> _Rows:
        params = [sequence.sampling for sequence in sequences]
        has_filters = any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params)
        return _Rows(
            sequence_ids=ids,
            positions=self.options.fill(sequences),
            draw=draws_with(self.options.first(len(ids), has_filters=has_filters)),
            may_edit=any(p.logit_bias or p.min_tokens or p.has_penalties for p in params),
            has_logprobs=any(p.logprobs is not None for p in params),
        )

    def _edit(self, logits: Tensor, sequences: Items[Sequence], positions: list[int]) -> Tensor:
        """Return `logits` with biases, bans and penalties; the same tensor if no row has any."""
        edits = {row: edit for row, s in enumerate(sequences) if (edit := self._edits_of(s, positions[row])).token_ids}
        if not edits:
            return logits
        edited = logits.to(torch.float32, copy=True)
        apply_penalties(edited, self._penalties(edits, sequences, positions))
        return edited

    def _edits_of(self, sequence: Sequence, position: int) -> _EditedTokens:
        """Return the logit changes of one row."""
        params = sequence.sampling
        if not (params.has_penalties or params.logit_bias or position < params.min_tokens):
            return _NO_EDITS
        edits = self._edits.get(sequence.id)
        if edits is None:
            edits = self._edits[sequence.id] = self._begin_edits(params)
        if params.has_penalties:
            edits.see(sequence)
        return edits

    def _begin_edits(self, params: SamplingParams) -> _EditedTokens:
        """Return the biases and bans of a sequence, built once for all its steps."""
        endings = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        bans = dict.fromkeys(endings, -float("inf")) if params.min_tokens else {}
        edits = _EditedTokens()
        for token, bias in {**params.logit_bias, **bans}.items():
            if 0 <= token < self._vocab_size:
                at = edits.entry(token)
                edits.early_biases[at] = bias
                edits.biases[at] = params.logit_bias.get(token, NO_BIAS)
        return edits

    def _penalties(
        self, edits: dict[int, _EditedTokens], sequences: Items[Sequence], positions: list[int]
    ) -> Penalties:
        """Return entries of the rows with `edits`, concatenated; on the device by one copy."""
        of_rows, params = list(edits.values()), [sequences[row].sampling for row in edits]
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


def _num_asked(sequences: Items[Sequence]) -> dict[int, int]:
    """Return the rows whose log-probabilities are requested, with the number of alternatives."""
    return {row: s.sampling.logprobs for row, s in enumerate(sequences) if s.sampling.logprobs is not None}
