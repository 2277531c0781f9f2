"""What can start in the engine within its next steps: the room that it offers to its queue. Knows no steps."""

from collections.abc import Iterable
from itertools import chain

from sluice.engine.config import EngineConfig
from sluice.engine.executor import ModelLimits
from sluice.engine.request import Room
from sluice.engine.scheduling.admission import AdmissionMode, num_longest_tokens
from sluice.engine.scheduling.blocks.manager import BlockManager
from sluice.engine.sequence import Sequence


class RoomEstimate:
    """Counts places, blocks and prompt tokens."""

    def __init__(
        self, config: EngineConfig, limits: ModelLimits, blocks: BlockManager, admission: AdmissionMode
    ) -> None:
        self._limits = limits
        self._blocks = blocks
        self._admission = admission
        self._max_step_tokens = config.max_num_batched_tokens
        # Prompt tokens that are offered while none are owed: two steps of them.
        self._num_offered_tokens = 2 * self._max_step_tokens

    def free(
        self, running: list[Sequence], ending: list[Sequence], waiting: Iterable[Sequence], num_places: int
    ) -> Room:
        """Return the room beside `running` without the `ending` ones, once `waiting` has what it needs."""
        waiting = list(waiting)
        num_owed = sum(sequence.num_uncomputed_tokens for sequence in chain(running, waiting))
        num_held = sum(self._admission.num_held_tokens(sequence) for sequence in waiting)
        num_free_blocks = self._blocks.num_free_blocks
        if ending:
            ended = {sequence.id for sequence in ending}
            running = [sequence for sequence in running if sequence.id not in ended]
            num_free_blocks += self._blocks.num_released_by(ending)
        num_free_blocks -= self._admission.num_spare_blocks(running)
        return Room(
            kv_tokens=max(0, self._num_tokens_in(num_free_blocks, running) - num_held),
            prefill_tokens=max(0, self._num_offered_tokens - num_owed),
            sequences=num_places,
            num_coming=min(len(ending), num_places),
        )

    def given_up(self, running: list[Sequence], yielding: list[Sequence], num_owed: int) -> Room:
        """Return the room for a class above that of `yielding`, which are some of `running`, without these.

        `num_owed` prompt tokens are computed before those of the class.
        """
        num_blocks = self._blocks.num_free_blocks + sum([len(sequence.held_blocks) for sequence in yielding])
        num_blocks = min(num_blocks, self._limits.num_blocks) - self._admission.num_spare_blocks(running)
        return Room(
            kv_tokens=max(0, self._num_tokens_in(num_blocks, running)),
            prefill_tokens=max(0, self._num_offered_tokens - num_owed),
            sequences=len(yielding),
            over_class=yielding[0].priority,
        )

    def _num_tokens_in(self, num_blocks: int, running: list[Sequence]) -> int:
        """Return how many tokens `num_blocks` hold.

        With a sliding window that depends on the lengths of sequences, which are taken to be those of the running ones.
        If none run, the tokens are of one sequence, so that there is room for the longest that fits alone.
        """
        limits = self._limits
        if not limits.sliding_window:
            return num_blocks * limits.block_size
        longest = limits.longest_sequence(num_blocks, self._max_step_tokens)
        if not running:
            return longest
        mean = sum(num_longest_tokens(sequence, limits) for sequence in running) // len(running)
        return min(longest, num_blocks * mean // limits.blocks_of(mean, 1))
