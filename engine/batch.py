"""What one step computes: frozen values that travel from the scheduler to the executor and back. Knows no tensors."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.request import TokenLogprobs
from engine.sequence import Sequence


# A named tuple, not a frozen dataclass, where one is made per sequence and step: 0.25 instead of 1.07 us.
class ScheduledSequence(NamedTuple):
    """A sequence and how many of its tokens this step computes.

    The step computes tokens `start` to `start + num_tokens` (exclusive) of the sequence. They are in
    `sequence.token_ids`, but for the one that the step in flight draws: then `start` is their number, `num_tokens` 1.
    """

    sequence: Sequence
    start: int
    """Tokens that were computed, or on their way in a step in flight, when the step was planned."""

    num_tokens: int
    samples: bool
    """Whether the step reaches the sequence's last known token, so that a new one is drawn."""


class PaddingRow(NamedTuple):
    """Work that nobody asked for: tokens computed only because the batch is a rectangle."""

    num_tokens: int
    context_len: int
    """Tokens that the last of them attends to, itself included."""


class BlockCopy(NamedTuple):
    """A block that is copied before the step computes: a sequence goes on from another's, which keeps its own."""

    sequence_id: int
    """Whose `destination` is, and who computes in this step what follows of it."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step, in the order in which they were scheduled."""

    sequences: tuple[ScheduledSequence, ...]
    num_joined: int = 0
    """How many of them, the last ones, were waiting before this step."""

    padding: tuple[PaddingRow, ...] = ()
    """What is computed besides: by a padded discipline, or to fill up a recorded step (`engine.graph_buckets.pad`).
    An executor does this work, and keeps nothing of it."""

    copies: tuple[BlockCopy, ...] = ()
    """No block is copied from one and to another: they may be copied in any order."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.sequences

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, all sequences, without padding."""
        return sum(scheduled.num_tokens for scheduled in self.sequences)

    @property
    def num_padding_tokens(self) -> int:
        """Tokens computed in this step for nobody."""
        return sum(row.num_tokens for row in self.padding)

    def part(self, sequences: tuple[ScheduledSequence, ...]) -> "Batch":
        """Some of the sequences, with their copies, and nothing else of it: a block of another one may be copied and
        written on already."""
        if not self.copies:
            return Batch(sequences)
        ids = {scheduled.sequence.id for scheduled in sequences}
        return Batch(sequences, copies=tuple(copy for copy in self.copies if copy.sequence_id in ids))


class Sampled(NamedTuple):
    """What the step drew for one sequence."""

    token_ids: tuple[int, ...]
    """One token today; several once drafts are verified. Empty when `error` says why."""

    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    """This row failed (NaN or all-masked logits): a sentence for whoever submitted it."""
