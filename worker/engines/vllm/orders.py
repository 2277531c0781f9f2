"""What a step of vLLM computes, and what came of it: plain values. Knows no vLLM and no tensors."""

from dataclasses import dataclass
from typing import NamedTuple

from sluice.engine.execution.slots import Slot

BlockIds = tuple[list[int], ...]
"""For each group of layers, blocks of a block table."""


class NewSequence(NamedTuple):
    """A sequence that vLLM does not know yet."""

    id: str
    slot: Slot
    """How its tokens are drawn: it travels to the workers with the sequence. For vLLM, the output that a sequence is
    admitted with is part of its prompt."""

    num_computed_tokens: int
    block_ids: BlockIds


class KnownSequence(NamedTuple):
    """A sequence of an earlier step, of which only news are sent."""

    id: str
    num_computed_tokens: int
    num_drawn_tokens: int
    """Since it was new."""

    new_block_ids: BlockIds | None
    token_ids: list[int]
    """Those that the step computes. A worker that draws no tokens, as in a pipeline, does not know the last one."""


class Draws(NamedTuple):
    """What is drawn at the end of a step. It travels to all workers."""

    sequences: frozenset[str]
    """Those of which a token is drawn: others have known tokens left to compute."""

    masks: dict[str, bytes]
    """By sequence: the tokens that it may draw, see `sluice.engine.batch.Masks`; all, without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """A step."""

    new: list[NewSequence]
    known: list[KnownSequence]
    num_tokens: dict[str, int]
    """How many tokens of each sequence are computed, by its id."""

    forgotten: set[str]
    """Sequences of earlier steps that never come back."""

    copies: list[tuple[int, int]]
    """Blocks that are copied before anything is computed: source and destination."""

    draws: Draws


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFacts:
    """Facts about a loaded vLLM."""

    version: str
    description: str
    """What its tokens depend on besides the model: version, runner, backend, parallel sizes, types."""

    num_blocks: int
    """Of its pool, which all groups share. The first one is its own."""

    block_size: int
    num_groups: int
    """Groups of layers with a block table each."""

    vocab_size: int
    max_model_len: int
    block_bytes: int
    dtype: str
    quantization: str | None
    """How the folder's weights are quantised, by vLLM's name; None: they are not."""
