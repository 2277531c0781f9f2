"""Admission modes: what a sequence reserves when it joins, so that the cache does not run out of blocks later.

| mode | reserved for a sequence that joins | preempted for blocks |
|---|---|---|
| `watermark` | its known tokens, and an entry for each running sequence to grow into | when all grow past that |
| `peak` | its known tokens; all that run must fit at the estimated peak | hardly: shared blocks count once |
| `guaranteed` | its longest possible output | never |
| `auto` | as `peak` or `watermark`, whichever costs less on this machine | as there |

An entry is a block in each block table: one block, unless the model has window groups. A sequence of a higher class
takes blocks in any mode (`scheduling.yielding`). With a sliding window, `guaranteed` may preempt: a block that left the
window comes back only when a step in flight has landed, and a shared one when it left all windows. Knows no steps and
no queue.
"""

from typing import Protocol

from sluice.engine.executor import ModelLimits, blocks_needed
from sluice.engine.scheduling.timing.measured_steps import MeasuredSteps
from sluice.engine.sequence import Sequence


class AdmissionMode(Protocol):
    """What joining takes."""

    def num_held_tokens(self, sequence: Sequence) -> int:
        """Return the tokens that `sequence` gets blocks for when it joins: at least its own."""
        ...

    def num_spare_blocks(self, running: list[Sequence], joining: Sequence | None = None) -> int:
        """Return the blocks that must stay free beside `running` when one joins; for any one if it is not known."""
        ...


class Watermark:
    """Admit what fits now; leave one entry for each running sequence, so that the join causes no preemption."""

    def __init__(self, limits: ModelLimits) -> None:
        self._blocks_per_entry = limits.blocks_per_entry

    def num_held_tokens(self, sequence: Sequence) -> int:
        """See `AdmissionMode`."""
        return len(sequence.token_ids)

    def num_spare_blocks(self, running: list[Sequence], joining: Sequence | None = None) -> int:
        """See `AdmissionMode`."""
        return len(running) * self._blocks_per_entry


class Guaranteed:
    """Reserve the longest possible output."""

    def __init__(self, limits: ModelLimits) -> None:
        self._limits = limits

    def num_held_tokens(self, sequence: Sequence) -> int:
        """See `AdmissionMode`."""
        return num_longest_tokens(sequence, self._limits)

    def num_spare_blocks(self, running: list[Sequence], joining: Sequence | None = None) -> int:
        """See `AdmissionMode`."""
        return 0


class Peak:
    """Admit what fits at the largest number of blocks that the running sequences will ever hold together.

    Sequences grow at one pace, and one that ends releases its blocks before the others need them. Sorted by the tokens
    that they may still get, the first i of them have grown by i times what the i-th gets when that one ends, and the
    others have released what they held; the peak is the largest of these (Gong et al., Past-Future Scheduler, ASPLOS
    2025, of LightLLM; here with the known maxima as lengths of outputs). Each sequence may have begun an entry more.
    Blocks of window groups count as many as a sequence will hold of them at most.
    """

    def __init__(self, limits: ModelLimits) -> None:
        self._limits = limits

    def num_held_tokens(self, sequence: Sequence) -> int:
        """See `AdmissionMode`."""
        return len(sequence.token_ids)

    def num_spare_blocks(self, running: list[Sequence], joining: Sequence | None = None) -> int:
        """See `AdmissionMode`. Sorts all that run."""
        if not running:
            return 0  # any sequence fits the cache alone, if not with the block that the estimate adds
        size = self._limits.block_size
        # With window groups, it is blocks of these that are passed.
        counts_passed = not self._limits.window_groups
        lives = [
            self._life(one, (len(one.block_table) - counts_passed * one.num_passed_blocks) * size) for one in running
        ]
        num_held_blocks = sum(one.num_held_blocks for one in running)
        if joining is not None:
            lives.append(self._life(joining, joining.num_tokens))
            num_held_blocks += self._limits.blocks_of(joining.num_tokens, 0)
        lives.sort(reverse=True)
        peak, num_alive_tokens, num_windowed = 0, 0, 0
        for count, (num_coming, num_known, num_window_blocks) in enumerate(lives, 1):
            num_alive_tokens += num_known
            num_windowed += num_window_blocks
            peak = max(peak, (num_alive_tokens + count * num_coming) // size + count + num_windowed)
        return max(0, peak - num_held_blocks)

    def _life(self, sequence: Sequence, num_held: int) -> tuple[int, int, int]:
        """Return how many tokens `sequence` may still get, and how many of its tokens have slots in `num_held`.

        The last number is the most blocks of window groups that it will hold.
        """
        longest = most = num_longest_tokens(sequence, self._limits)
        num_window_blocks = 0
        if self._limits.window_groups:
            num_window_blocks = self._limits.blocks_of(longest, 1) - blocks_needed(longest, self._limits.block_size)
        elif self._limits.sliding_window:
            # Beyond the window, a sequence gives back what it takes.
            most = min(longest, self._limits.sliding_window)
        num_known = min(sequence.num_tokens, num_held, most)
        return most - num_known, num_known, num_window_blocks


class Auto:
    """As `Peak` where computing a token again costs more than a row that stays idle, else as `Watermark`.

    Watermark fills the cache with rows, and computes a share of their tokens twice. Peak leaves rows idle, so fewer
    rows share the fixed part of a step. So what decides is how much of a full step its tokens take.
    """

    def __init__(self, limits: ModelLimits, steps: MeasuredSteps) -> None:
        self._steps = steps
        self._watermark = Watermark(limits)
        self._peak = Peak(limits)

    def num_held_tokens(self, sequence: Sequence) -> int:
        """See `AdmissionMode`."""
        return len(sequence.token_ids)

    def num_spare_blocks(self, running: list[Sequence], joining: Sequence | None = None) -> int:
        """See `AdmissionMode`."""
        step_time = self._steps.step_time
        is_token_dear = step_time.token_s * len(running) > TOKEN_SHARE * step_time.fixed_s
        return (self._peak if is_token_dear else self._watermark).num_spare_blocks(running, joining)


TOKEN_SHARE = 0.3
"""Time of a step's tokens over its fixed part, above which `Peak` costs less: from -0.4 % tokens a second at 0.25 to
+13 % at 2 (docs/lab/budgets.md).
"""


def num_longest_tokens(sequence: Sequence, limits: ModelLimits) -> int:
    """Return the tokens that `sequence` can ever have blocks for: at least those that it has."""
    most = limits.most_cached_tokens(sequence.num_prompt_tokens, sequence.sampling.max_tokens)
    return max(len(sequence.token_ids), most)


def make_admission(name: str, limits: ModelLimits, steps: MeasuredSteps) -> AdmissionMode:
    """Make the mode `name`, one of `config.ADMISSION_NAMES`."""
    if name == "watermark":
        return Watermark(limits)
    if name == "auto":
        return Auto(limits, steps)
    return Peak(limits) if name == "peak" else Guaranteed(limits)
