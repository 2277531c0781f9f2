"""One sequence being generated: its tokens, its blocks, how far it is computed. Knows no tensors and no text."""

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.request import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    RUNNING = auto()
    LEAVING = auto()
    """Preempted while a step that has it is in flight: it waits as soon as that step is over."""

    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice of one request while it is generated. Changes with every step; only the scheduler moves it.

    A sequence has no phase: it is owed `num_uncomputed_tokens` tokens, one (a decode) or thousands (a prefill).

    While a step is in flight, what it computes and draws is counted apart: it may yet fail.
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

    token_ids: list[int]
    """Prompt, then output (a resumed sequence starts with its earlier output)."""

    num_prompt_tokens: int
    num_resumed_tokens: int = 0
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0
    """Tokens beyond these that a step in flight computes."""

    num_drawn_tokens: int = 0
    """Tokens that a step in flight draws: the device will have them, and the host does not know them."""

    num_blind_tokens: int = 0
    """As long as it has no more tokens, those in flight included, the next one can be planned before their ids are
    known."""

    block_table: list[int] = field(default_factory=list[int])
    num_slots: int = 0
    """Token slots of the blocks in `block_table`."""

    block_hashes: list[int] = field(default_factory=list[int])
    """Chained hash of each full block of `token_ids`, extended as tokens arrive."""

    num_published_blocks: int = 0
    """Leading blocks of `block_table` that the prefix cache was told of, or that came from it."""

    copied_from: int | None = None
    """The block that the one with its first uncomputed token is copied from, until a step has succeeded that did it."""

    status: SequenceStatus = SequenceStatus.WAITING
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, including those of earlier attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are neither in the cache nor on their way there."""
        num_coming = self.num_drawn_tokens - self.num_launched_tokens
        return len(self.token_ids) + num_coming - self.num_computed_tokens

    def __str__(self) -> str:
        return (
            f"{self.request_id}/{self.choice} {self.status.name.lower()}: {self.num_prompt_tokens} prompt "
            f"+ {self.num_output_tokens} output tokens, {self.num_computed_tokens} computed, "
            f"{len(self.block_table)} blocks, {self.num_preemptions} preemptions"
        )
