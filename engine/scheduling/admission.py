"""Admission modes: what a sequence reserves when it joins, so that the cache does not run out of blocks later.

| mode | reserved for a sequence that joins | preempted for blocks |
|---|---|---|
| `watermark` | its known tokens, and an entry for each running sequence to grow into | when all grow past that |
| `guaranteed` | its longest possible output | never |

An entry is a block in each block table: one block, unless the model has window groups. A sequence of a higher class
takes blocks in any mode (`scheduling.yielding`). With a sliding window, `guaranteed` may preempt: a block that left the
window comes back only when a step in flight has landed, and a shared one when it left all windows. Knows no steps and
no queue.
"""

from sluice.engine.executor import ModelLimits
from sluice.engine.sequence import Sequence


class AdmissionMode:
    """The mode `guaranteed`: reserve the longest possible output."""

    def __init__(self, limits: ModelLimits) -> None:
        self._limits = limits

    def num_held_tokens(self, sequence: Sequence) -> int:
        """Return the tokens that `sequence` gets blocks for when it joins: at least its own."""
        return num_longest_tokens(sequence, self._limits)

    def num_spare_blocks(self, running: list[Sequence]) -> int:
        """Return the blocks that must stay free beside `running` when a sequence joins."""
        return 0


class Watermark(AdmissionMode):
    """The mode `watermark`: admit what fits now, and leave one entry for each running sequence to grow into."""

    def num_held_tokens(self, sequence: Sequence) -> int:
        """See `AdmissionMode.num_held_tokens`."""
        return len(sequence.token_ids)

    def num_spare_blocks(self, running: list[Sequence]) -> int:
        """See `AdmissionMode.num_spare_blocks`."""
        return len(running) * self._limits.blocks_per_entry


def num_longest_tokens(sequence: Sequence, limits: ModelLimits) -> int:
    """Return the tokens that `sequence` can ever have blocks for: at least those that it has."""
    most = limits.most_cached_tokens(sequence.num_prompt_tokens, sequence.sampling.max_tokens)
    return max(len(sequence.token_ids), most)


def make_admission(name: str, limits: ModelLimits) -> AdmissionMode:
    """Make the mode `name`, one of `config.ADMISSION_NAMES`."""
    return Watermark(limits) if name == "watermark" else AdmissionMode(limits)
