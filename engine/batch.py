"""Contents of one step: plain, frozen values passed from the scheduler to the executor and back. Knows no tensors.

A running sequence has a row slot, from its admission until the last step that has it has landed. The executor keeps
what a step needs of a sequence by slot: its tokens, its block table, its sampling options. A batch names the slots that
it computes and brings what has changed in them (`Admission`, `TableWrite`).

Such a write says what a slot contains, not what to add: repeating it changes nothing. So a step can be run again, whole
or in parts, whatever became of the attempt before; and the scheduler repeats a write in each step until one with it has
succeeded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from sluice.engine.request import Embed, PromptRead, SampledLogprobs, Sampling


# A named tuple instead of a frozen dataclass: one is made per sequence and step, in 0.25 instead of 1.07 us.
class ScheduledRow(NamedTuple):
    """A running sequence and the number of its tokens that this step computes.

    The step computes tokens `start` to `start + num_tokens` (exclusive). The slot has all of them, except a token that
    the step in flight samples: then `num_tokens` is 1, and only the device knows it.
    """

    slot: int
    sequence_id: int
    """The generation of the slot: ids are never reused, slots are."""

    start: int
    """Tokens computed, or scheduled in a step in flight, when this step was planned."""

    num_tokens: int
    """Without the drafts that may follow them (`Batch.drafts`)."""

    samples: bool
    """Whether the step reaches the sequence's last known token, and so samples a new one or, if `max_tokens` is 0, ends
    its prompt.
    """

    def first(self, num_tokens: int) -> "ScheduledRow | None":
        """Return the row that computes only the first of its tokens; None if these are none."""
        if num_tokens == self.num_tokens:
            return self
        return self._replace(num_tokens=num_tokens, samples=False) if num_tokens else None


class Admission(NamedTuple):
    """Contents of a slot that a sequence has got. They replace those of any other sequence."""

    slot: int
    sequence_id: int
    request_id: str
    choice: int
    sampling: Sampling
    cache_salt: str
    """Under which its blocks are found; for checks."""

    token_ids: tuple[int, ...]
    """Prompt and output so far. The executor adds the tokens that it samples."""

    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    window_ids: tuple[tuple[int, ...], ...] = ()
    """As many entries of the table of each window group; empty if there are none."""

    adapter: str = ""
    """The adapter that computes it with the model; empty: none. If another is in its place, this one replaces it."""

    adapter_place: int = -1
    """-1 without an adapter."""


class TableWrite(NamedTuple):
    """Blocks of a running sequence: they are entries `first` and following of its block table."""

    slot: int
    sequence_id: int
    first: int
    block_ids: tuple[int, ...]
    window_ids: tuple[tuple[int, ...], ...] = ()
    """As in `Admission`."""


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


Drafts = Mapping[int, tuple[int, ...]]
"""By sequence id: guesses of its next tokens (`sluice.engine.speculation`). Sequences without any are left out."""

MAX_DRAFTS = 64
"""Most drafts of a step, over all rows: rows of logits that a step may have besides one for each sequence."""

NO_DRAFTS: Drafts = MappingProxyType({})


Masks = Mapping[int, tuple[bytes, ...]]
"""By sequence id: the tokens that its row may sample, and those that may follow each of its drafts. Token t is bit
t % 8 of byte t // 8; each mask has `mask_bytes(vocab_size)`. Sequences without a grammar are left out.
"""

NO_MASKS: Masks = MappingProxyType({})


def mask_bytes(vocab_size: int) -> int:
    """Return the bytes of a mask: whole words of 32 bits."""
    return -(-vocab_size // 32) * 4


class Read(NamedTuple):
    """What is read from the hidden states of a sequence's prompt. The row that samples returns it (`Sampled.prompt`).

    The executor keeps what it has read of earlier chunks; a chunk that is computed again replaces its part.
    """

    embed: Embed | None = None
    """The vector of the prompt."""

    num_logprobs: int | None = None
    """Log-probabilities of its tokens, each with this many of the likeliest; None: none are read."""

    @property
    def needs_all(self) -> bool:
        """Whether every token of the prompt must be computed, cached or not."""
        return self.num_logprobs is not None or (self.embed is not None and self.embed.pooling == "mean")


Reads = Mapping[int, Read]
"""By sequence id. Sequences from which nothing is read but the next token are left out."""

NO_READS: Reads = MappingProxyType({})


class BlockSave(NamedTuple):
    """A copy of a block of the device to the host tier, before the step computes.

    It is made once: in a later try or step, the block may hold something else.
    """

    number: int
    """Each is larger than those before it."""

    source: int
    """On the device."""

    destination: int
    """In the host tier."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step, in scheduling order."""

    rows: tuple[ScheduledRow, ...]
    num_joined: int = 0
    """Number of sequences, at the end of `rows`, that joined in this step."""

    padding: tuple[PaddingRow, ...] = ()
    """Padding of a padded discipline, or padding that fills up a recorded step (`buckets.pad`).
    The executor computes it and discards the result.
    """

    admissions: tuple[Admission, ...] = ()
    """Made before `table_writes`, and both before anything is computed."""

    table_writes: tuple[TableWrite, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    """Copies, independent of each other: no block is both a source and a destination."""

    loads: tuple[BlockCopy, ...] = ()
    """Copies from blocks of the host tier, before `copies`."""

    saves: tuple[BlockSave, ...] = ()
    """Made before `loads`, in their order; every part of a step carries them all."""

    drafts: Drafts = field(default_factory=lambda: NO_DRAFTS)
    """Of rows that sample: computed after the row's own tokens, and verified. Each of them samples a token, too, with
    the noise of its position; those that follow a wrong draft are discarded.
    """

    masks: Masks = field(default_factory=lambda: NO_MASKS)
    """Of rows that sample. All other tokens have probability 0; if none is left, the row fails."""

    draws_later: bool = False
    """Whether its rows are drawn when `DrawnLater.draw` is called: a mask depends on a token of the step in flight."""

    reads: Reads = field(default_factory=lambda: NO_READS)
    """Of rows that compute a part of a prompt, or the first that samples after it."""

    unread: tuple[int, ...] = ()
    """Ids of sequences that ended before their prompts were read: what was kept of them is forgotten."""

    @property
    def is_empty(self) -> bool:
        """Whether the step has no rows."""
        return not self.rows

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step over all rows, with drafts, without padding."""
        return sum(row.num_tokens for row in self.rows) + self.num_drafts

    @property
    def num_drafts(self) -> int:
        """Drafts of all rows."""
        return sum(map(len, self.drafts.values()))

    @property
    def num_padding_tokens(self) -> int:
        """Padding tokens computed in this step."""
        return sum(row.num_tokens for row in self.padding)

    def with_writes(self, admissions: tuple[Admission, ...], table_writes: tuple[TableWrite, ...]) -> "Batch":
        """Return the batch with these writes."""
        return replace(self, admissions=admissions, table_writes=table_writes)

    def part(self, rows: tuple[ScheduledRow, ...]) -> "Batch":
        """Return a batch of only the given rows, their writes, copies and drafts.

        Padding is dropped, and so are the copies of other sequences, whose destination blocks may already have been
        written.
        """
        if not (self.admissions or self.table_writes or self.copies or self.loads or self.saves or self.drafts):
            return Batch(rows, masks=self.masks, reads=self.reads, unread=self.unread)
        ids = {row.sequence_id for row in rows}
        return Batch(
            rows,
            admissions=tuple(admission for admission in self.admissions if admission.sequence_id in ids),
            table_writes=tuple(write for write in self.table_writes if write.sequence_id in ids),
            copies=tuple(copy for copy in self.copies if copy.sequence_id in ids),
            drafts={sequence_id: drafts for sequence_id, drafts in self.drafts.items() if sequence_id in ids},
            loads=tuple(load for load in self.loads if load.sequence_id in ids),
            saves=self.saves,
            masks=self.masks,
            reads=self.reads,
            unread=self.unread,
        )


class Sampled(NamedTuple):
    """Tokens sampled for one sequence in a step."""

    token_ids: tuple[int, ...]
    """One token, after the drafts that equal what was sampled in their places. Empty if `error` is set, or if the
    sequence's `max_tokens` is 0.
    """

    logprobs: tuple[SampledLogprobs, ...] | None = None
    error: str | None = None
    """Why this row failed (NaN or all-masked logits), in a sentence for the producer of the request."""

    prompt: PromptRead | None = None
    """What `Batch.reads` asks of it."""


def without_token(position: int) -> Sampled:
    """Return the row of a sequence whose logits leave no token at `position` of its output."""
    error = f"the model's logits were not finite, or every token was masked, at output token {position}"
    return Sampled((), None, error)
