"""One sequence being generated: its tokens, its blocks and its progress. Knows no tensors and no text."""

from dataclasses import dataclass, field
from enum import Enum, auto

from sluice.engine.request import NEVER_PREEMPTED, NO_TARGETS, LatencyTargets, Preemptions, SamplingParams


class SequenceStatus(Enum):
    """State of a sequence."""

    WAITING = auto()
    RUNNING = auto()
    LEAVING = auto()
    """Preempted while a step with its row is in flight: it returns to waiting when that step completes."""

    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice of one request during generation. Mutable; only the scheduler changes its state.

    A sequence has no phase: it is owed `num_uncomputed_tokens` tokens, one (decode) or thousands (prefill).

    Tokens of a step in flight are counted separately, since the step may still fail.
    """

    id: int
    """Unique in this engine; never reused."""

    request_id: str
    choice: int
    sampling: SamplingParams
    priority: int = 0
    arrival_s: float = 0.0
    tenant: str = ""
    cache_salt: str = ""
    targets: LatencyTargets = NO_TARGETS

    token_ids: list[int]
    """Prompt, then output (a resumed sequence starts with its earlier output)."""

    num_prompt_tokens: int
    num_resumed_tokens: int = 0
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0
    """Tokens beyond the computed ones that a step in flight computes."""

    num_drawn_tokens: int = 0
    """Tokens that a step in flight samples: known on the device, not yet on the host."""

    num_launched_drafts: int = 0
    """Drafts that a step in flight verifies: until it has landed, the position of the next token is not known."""

    num_blind_tokens: int = 0
    """Maximum number of tokens, including those in flight, at which the next one can be planned without knowing their
    ids.
    """

    slot: int = -1
    """Its row slot while it has blocks, else -1 (`sluice.engine.scheduling.row_slots`)."""

    num_sent_blocks: int = 0
    """Leading blocks of `block_table` that the executor is known to have. 0: it does not have the sequence."""

    block_table: list[int] = field(default_factory=list[int])
    window_table: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    """With window groups, the blocks of each of them, for the same tokens as the first entries of `block_table`. Then
    `block_table` is of the layers that attend to all tokens.
    """

    num_slots: int = 0
    """Tokens that it has blocks for in all layers."""

    num_passed_blocks: int = 0
    """Leading entries of `window_table`, or without window groups of `block_table`, that it does not hold.

    They are before the sliding window, and nothing reads them.
    """

    block_hashes: list[int] = field(default_factory=list[int])
    """Chained hash of each full block of `token_ids`, extended as tokens arrive."""

    num_published_blocks: int = 0
    """Leading blocks of `block_table` that are published in the prefix cache or came from it."""

    cow_sources: tuple[int, ...] = ()
    """Sources of the pending copy-on-write of the block with the first uncomputed token, one for each block table.

    Empty once a step with the copies has succeeded.
    """

    loads: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Pending loads, (block of the host tier, block of `block_table`); empty once a step with them has succeeded."""

    status: SequenceStatus = SequenceStatus.WAITING
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    preemptions: Preemptions = NEVER_PREEMPTED
    num_yields: int = 0
    """Preemptions in favour of a sequence of a higher class."""

    num_overtaken: int = 0
    """Sequences that joined before it while it was held back for a prefix that another one computes."""

    first_scheduled_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def has_pending_copies(self) -> bool:
        """Whether no step has succeeded yet that fills its blocks from others."""
        return bool(self.cow_sources) or bool(self.loads)

    @property
    def num_held_blocks(self) -> int:
        """Blocks of its tables that it holds."""
        if not self.window_table:
            return len(self.block_table) - self.num_passed_blocks
        num_windowed = len(self.window_table) - self.num_passed_blocks
        return len(self.block_table) + num_windowed * len(self.window_table[0])

    def blocks_at(self, index: int) -> tuple[int, ...]:
        """Return the blocks of entry `index` in all tables."""
        return (self.block_table[index], *(self.window_table[index] if self.window_table else ()))

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, including those of earlier attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are neither cached nor being computed by a step in flight."""
        num_coming = self.num_drawn_tokens - self.num_launched_tokens
        return len(self.token_ids) + num_coming - self.num_computed_tokens

    def __str__(self) -> str:
        return (
            f"{self.request_id}/{self.choice} {self.status.name.lower()}: {self.num_prompt_tokens} prompt "
            f"+ {self.num_output_tokens} output tokens, {self.num_computed_tokens} computed, "
            f"{self.num_held_blocks} blocks, {self.num_preemptions} preemptions"
        )
