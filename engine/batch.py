"""Contents of one step: frozen values passed from the scheduler to the executor and back. Knows no tensors."""

from dataclasses import dataclass
from typing import NamedTuple

from sluice.engine.request import TokenLogprobs
from sluice.engine.sequence import Sequence


# A named tuple instead of a frozen dataclass: one is made per sequence and step, in 0.25 instead of 1.07 us.
class ScheduledSequence(NamedTuple):
    """A sequence and the number of its tokens that this step computes.

    The step computes tokens `start` to `start + num_tokens` (exclusive). All of them are in `sequence.token_ids`,
    except a token that the step in flight samples: then `start` equals the length of `token_ids` and `num_tokens` is 1.
    """

    sequence: Sequence
    start: int
    """Tokens computed, or scheduled in a step in flight, when this step was planned."""

    num_tokens: int
    samples: bool
    """Whether the step reaches the sequence's last known token and so samples a new one."""


class PaddingRow(NamedTuple):
    """Padding: tokens computed only because the batch is a rectangle or fills a recorded step."""

    num_tokens: int
    context_len: int
    """Tokens that the last padding token attends to, including itself."""


class BlockCopy(NamedTuple):
    """A copy-on-write block copy that runs before the step computes."""

    sequence_id: int
    """The sequence that owns `destination` and is computed in this step."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step, in scheduling order."""

    sequences: tuple[ScheduledSequence, ...]
    num_joined: int = 0
    """Number of sequences, at the end of `sequences`, that joined in this step."""

    padding: tuple[PaddingRow, ...] = ()
    """Padding of a padded discipline, or padding that fills up a recorded step (`graph_buckets.pad`).
    The executor computes it and discards the result.
    """

    copies: tuple[BlockCopy, ...] = ()
    """Copies, independent of each other: no block is both a source and a destination."""

    @property
    def is_empty(self) -> bool:
        """Whether the step has no sequences."""
        return not self.sequences

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step over all sequences, without padding."""
        return sum(scheduled.num_tokens for scheduled in self.sequences)

    @property
    def num_padding_tokens(self) -> int:
        """Padding tokens computed in this step."""
        return sum(row.num_tokens for row in self.padding)

    def part(self, sequences: tuple[ScheduledSequence, ...]) -> "Batch":
        """Return a batch of only the given sequences and their copies.

        Padding is dropped, and so are the copies of other sequences, whose destination blocks may already have been
        written.
        """
        if not self.copies:
            return Batch(sequences)
        ids = {scheduled.sequence.id for scheduled in sequences}
        return Batch(sequences, copies=tuple(copy for copy in self.copies if copy.sequence_id in ids))


class Sampled(NamedTuple):
    """Tokens sampled for one sequence in a step."""

    token_ids: tuple[int, ...]
    """One token; several once speculative drafts are verified. Empty if `error` is set."""

    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    """Why this row failed (NaN or all-masked logits), in a sentence for the producer of the request."""
