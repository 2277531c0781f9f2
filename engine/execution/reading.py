"""Read prompts from their hidden states: one vector, or the log-probability of each token. Knows no scheduler.

A prompt is computed in chunks, in any number of steps. What was read of a chunk is kept by its first position, and
replaced if the chunk is computed again: after a failed step, or a preemption. The row that samples returns the whole.

A vector does not depend on the chunks: a mean is a sum of integers, which is the same in any order.

Hot only for steps that read: others do not run this code.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice.engine.batch import Batch, Masks, Read, Sampled, ScheduledRow
from sluice.engine.execution.kept_rows import KeptRows, Part, draws
from sluice.engine.execution.slots import Slot, Slots
from sluice.engine.execution.transfers import PendingCopy, to_device
from sluice.engine.executor import DrawnLater, Launched
from sluice.engine.models.decoder import Decoder
from sluice.engine.request import UNPREDICTED, Embed, PromptRead, SampledLogprobs
from sluice.kernels.logprobs import logprobs

SLICE_ROWS = 64
"""Rows that are projected or added at once, so that the memory does not grow with the prompt."""

_FIXED_POINT = 2.0**28
"""Normed hidden states are below 2**14, so that the sum of a million of them fits 64 bits. One is off by 2e-9."""

_MOST = 2.0**14


class _Taken(NamedTuple):
    """What was read of a part."""

    end: int
    """Position after it."""

    tensors: tuple[Tensor, ...]
    """Of a vector, the sum `[M]` in fixed point, and whether all were finite; else of the tokens that follow, `[n, 1]`
    log-probabilities, `[n, K]` of the likeliest, and their ids.
    """


class PromptReader:
    """What has been read of the prompts in the slots. Mutable."""

    def __init__(self, decoder: Decoder, slots: Slots, device: torch.device) -> None:
        self._decoder, self._slots, self._device = decoder, slots, device
        self._taken: dict[int, dict[int, _Taken]] = {}
        """By sequence id, then by first position."""

    def take(self, hidden: Tensor, kept: KeptRows) -> None:
        """Read the parts of a step from its hidden states `[R, M]`."""
        self._forget_replaced()
        for part in kept.parts:
            states = hidden[part.first : part.first + part.num_tokens]
            if part.read.embed is not None:
                tensors = _summed(self._decoder.classify(states) if part.read.embed.is_classified else states)
            else:
                tensors = self._scored(states, part, self._slots[part.row])
            of_sequence = self._taken.setdefault(part.row.sequence_id, {})
            of_sequence[part.start] = _Taken(part.start + part.num_tokens, tensors)

    def whole(self, row: ScheduledRow, read: Read) -> tuple[Tensor, ...]:
        """Return what was read of all parts of a prompt, whose last token is computed."""
        parts = list(self._in_order(row, read))
        if read.embed is not None:
            sums, finite = zip(*parts, strict=True)
            return torch.stack(sums).sum(0), torch.stack(finite).all()
        if not parts:
            return ()
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Forget prompts, which were returned or are wanted no more."""
        for sequence_id in sequence_ids:
            self._taken.pop(sequence_id, None)

    @property
    def num_kept(self) -> int:
        """Prompts of which something is kept."""
        return len(self._taken)

    def _in_order(self, row: ScheduledRow, read: Read) -> Iterator[tuple[Tensor, ...]]:
        """Yield the parts of a prompt. Those that are left of another division into chunks are passed over."""
        slot, taken = self._slots[row], self._taken.get(row.sequence_id, {})
        num_read = slot.num_prompt_tokens - (read.embed is None)
        position = 0 if read.needs_all else num_read - 1
        while position < num_read:
            part = taken[position]
            yield part.tensors
            position = part.end

    def _forget_replaced(self) -> None:
        """Forget prompts whose sequences have left: another has their slot."""
        gone = [sequence_id for sequence_id in self._taken if not self._slots.has(sequence_id)]
        for sequence_id in gone:
            del self._taken[sequence_id]

    def _scored(self, states: Tensor, part: Part, slot: Slot) -> tuple[Tensor, ...]:
        """Return the log-probabilities of the tokens after a part, and of the likeliest in their places."""
        following = slot.token_ids[part.start + 1 : part.start + 1 + part.num_tokens]
        targets = to_device(np.array(following, dtype=np.int64), self._device)
        count = part.read.num_logprobs or 0
        slices = [
            logprobs(self._decoder.project(rows.contiguous()), ids, count=count)
            for rows, ids in zip(states.split(SLICE_ROWS), targets.split(SLICE_ROWS), strict=True)
        ]
        return tuple(torch.cat(tensors) for tensors in zip(*slices, strict=True))


def _summed(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum `[M]` of hidden states `[n, M]` in fixed point, and whether all are finite."""
    total = torch.zeros(states.shape[1], dtype=torch.int64, device=states.device)
    is_finite = torch.ones((), dtype=torch.bool, device=states.device)
    for rows in states.split(SLICE_ROWS):
        values = rows.double()
        is_finite &= (values.abs() < _MOST).all()
        total += (values * _FIXED_POINT).round().nan_to_num().long().sum(0)
    return total, is_finite


class ReadStep(NamedTuple):
    """A launched step some of whose rows read their prompts."""

    launched: Launched
    """Of the rows that draw."""

    sampling: list[ScheduledRow]
    """Rows that return something."""

    draws: list[bool]
    """Which of them draw."""

    whole: dict[int, tuple[Read, Slot, int]]
    """By sequence id, prompts that are whole with this step; and how many tensors each has in the copy."""

    pending_copy: PendingCopy
    reader: PromptReader

    def draw(self, masks: Masks) -> None:
        """See `DrawnLater.draw`."""
        if isinstance(self.launched, DrawnLater):
            self.launched.draw(masks)

    def collect(self) -> list[Sampled]:
        """See `Launched.collect`."""
        drawn = iter(self.launched.collect())
        prompts = dict(self._prompts())
        rows: list[Sampled] = []
        for row, is_drawn in zip(self.sampling, self.draws, strict=True):
            sampled, prompt = next(drawn) if is_drawn else Sampled(()), prompts.get(row.sequence_id)
            if isinstance(prompt, str):
                sampled = Sampled((), error=prompt)
            elif prompt is not None:
                sampled = sampled._replace(prompt=prompt)
            rows.append(sampled)
        self.reader.forget(prompts)
        return rows

    def _prompts(self) -> Iterator[tuple[int, PromptRead | str]]:
        """Yield what was read of each prompt that is whole, or why it cannot be used."""
        arrived = iter(self.pending_copy.wait())
        for sequence_id, (read, slot, num_tensors) in self.whole.items():
            tensors = [next(arrived) for _ in range(num_tensors)]
            if read.embed is not None:
                num_states = slot.num_prompt_tokens if read.embed.pooling == "mean" else 1
                yield sequence_id, _vector(tensors[0], bool(tensors[1]), num_states, read.embed)
            else:
                yield sequence_id, PromptRead(logprobs=_logprobs(tensors, read.num_logprobs or 0))


def launched_reads(
    reader: PromptReader, launched: Launched, batch: Batch, slots: Slots, device: torch.device
) -> ReadStep:
    """Return the step whose parts the reader has taken, with what is whole now on its way to the host."""
    sampling = [row for row in batch.rows if row.samples]
    whole: dict[int, tuple[Read, Slot, int]] = {}
    sent: list[Tensor] = []
    for row in sampling:
        read = batch.reads.get(row.sequence_id)
        if read is not None:
            tensors = reader.whole(row, read)
            whole[row.sequence_id] = read, slots[row], len(tensors)
            sent += tensors
    is_drawn = [draws(slots[row]) for row in sampling]
    return ReadStep(launched, sampling, is_drawn, whole, PendingCopy(tuple(sent), device), reader)


def _vector(total: Tensor, is_finite: bool, num_states: int, wanted: Embed) -> PromptRead | str:
    """Finish a vector: divide its sum, cut it, and scale it."""
    if not is_finite:
        return "the model's hidden states were not finite, or over 16384"
    values: NDArray[np.float64] = total.numpy().astype(np.float64)[: wanted.dimensions] / (_FIXED_POINT * num_states)
    if wanted.is_normalised:
        values /= max(float(np.sqrt(np.square(values).sum())), 1e-12)
    return PromptRead(embedding=values.astype("<f4").tobytes())


def _logprobs(tensors: Items[Tensor], count: int) -> tuple[SampledLogprobs, ...]:
    if not tensors:  # a prompt of one token
        return (UNPREDICTED,)
    chosen, values, token_ids = [tensor.tolist() for tensor in tensors]
    return UNPREDICTED, *(
        SampledLogprobs(chosen=own[0], top=tuple(zip(ids[:count], likeliest, strict=False)))
        for own, likeliest, ids in zip(chosen, values, token_ids, strict=True)
    )
