"""The sequences that a draft model has in its cache, and the steps that it computes for them.

The draft model has row slots and blocks of its own. A sequence gets them when it is first guessed, and keeps them until
it ends, or until others need them and it was not guessed for a while: it was preempted, or had better guesses. What the
model has not seen of a sequence is computed before its next guess, as far as one step has tokens for it.

Hot: a few passes of Python over the rows.
"""

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import count

from sluice.engine.batch import Admission, Batch, Sampled, ScheduledRow
from sluice.engine.config import StepLimits
from sluice.engine.executor import Executor, blocks_needed
from sluice.engine.request import Sampling
from sluice.engine.sequence import Sequence

KEPT_FOR = 16
"""Rounds for which a sequence that is not guessed keeps its blocks although others need them."""

_GREEDY = Sampling(temperature=0.0)
_PLAIN = 4
"""Tokens for each row up to which the time of a step counts as usual: more are a prompt."""

_MEMORY = 32
"""Steps over which their time is averaged."""

_Row = tuple[ScheduledRow, Sequence, int]
"""A row that samples, the sequence that it guesses, and how many tokens to guess."""


@dataclass(slots=True, eq=False)
class _Held:
    """What the draft model has of a sequence. Mutable."""

    slot: int
    used: int
    """The round in which it was guessed last."""

    block_table: list[int] = field(default_factory=list[int])
    num_read_tokens: int = 0
    """Leading tokens of the sequence that its blocks have."""


class DraftRows:
    """Row slots and blocks of a draft model. Mutable."""

    def __init__(self, executor: Executor, limits: StepLimits, *, vocab_size: int, clock: Callable[[], float]) -> None:
        """Start with an empty cache.

        Args:
            executor: the draft model, with as many row slots as `limits` says. Nobody else uses it.
            limits: of one of its steps.
            vocab_size: of the model whose tokens it guesses.
            clock: seconds, monotonic.
        """
        self._executor = executor
        self._step_limits = limits
        self._vocab_size = vocab_size
        self._clock = clock
        self._held: OrderedDict[int, _Held] = OrderedDict()
        """By sequence id, the one guessed last at the end."""

        self._free_slots: list[int] = []
        self._free_blocks: list[int] = []
        self.release_all()
        self._generations = count()
        """Ids of rows: a sequence has a new one in each round, since its slot may have wrong guesses."""

        self._round = 0
        self._num_steps = 0
        self.step_s = 0.0
        """Mean time of a step without prompts; 0 until one was measured."""

    @property
    def num_held(self) -> int:
        """Sequences that have blocks."""
        return len(self._held)

    def guess(self, depths: Items[tuple[Sequence, int]]) -> dict[int, tuple[int, ...]]:
        """Return guesses by sequence id, up to `depths` of each; none for sequences that are not computed so far.

        Raises:
            Exception: any error of the device. Call `release_all` then.
        """
        self._round += 1
        held = [(sequence, depth) for sequence, depth in depths if self._try_hold(sequence, depth)]
        batch, drafting = self._first_step(held)
        guesses: dict[int, tuple[int, ...]] = {}
        while batch.rows:
            coming: list[_Row] = []
            for (row, sequence, depth), sampled in zip(drafting, self._compute(batch), strict=True):
                if not sampled.token_ids or sampled.token_ids[0] >= self._vocab_size:
                    continue
                guesses[sequence.id] = guessed = guesses.get(sequence.id, ()) + sampled.token_ids
                if len(guessed) < depth:
                    coming.append((row._replace(start=row.start + row.num_tokens, num_tokens=1), sequence, depth))
            drafting, batch = coming, Batch(tuple(row for row, _, _ in coming))
        return guesses

    def note(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Note how many leading tokens of `sequence` are in its blocks, if it has any: some are right guesses."""
        if (held := self._held.get(sequence.id)) is not None:
            held.num_read_tokens = num_computed_tokens

    def release(self, sequence: Sequence) -> None:
        """Free the slot and the blocks of `sequence`, if it has any."""
        if (held := self._held.pop(sequence.id, None)) is not None:
            self._free_slots.append(held.slot)
            self._free_blocks += held.block_table

    def release_all(self) -> None:
        """Free everything."""
        self._held.clear()
        self._free_slots = list(range(self._step_limits.max_num_seqs))
        self._free_blocks = list(range(self._executor.limits.num_blocks))

    def check_invariants(self) -> None:
        """Check that each slot and each block is free, or held once.

        Raises:
            AssertionError: one is not.
        """
        held = self._held.values()
        slots = [*self._free_slots, *(rows.slot for rows in held)]
        blocks = [*self._free_blocks, *(block_id for rows in held for block_id in rows.block_table)]
        assert sorted(slots) == list(range(self._step_limits.max_num_seqs)), "slots of drafts are lost or held twice"
        assert sorted(blocks) == list(range(self._executor.limits.num_blocks)), "blocks of drafts are lost"

    def _try_hold(self, sequence: Sequence, depth: int) -> bool:
        """Get `sequence` a slot, and blocks for `depth` guesses; False if there are none, or they cannot be read."""
        num_tokens = len(sequence.token_ids) + depth - 1
        limits, held = self._executor.limits, self._held.get(sequence.id)
        num_computed = held.num_read_tokens if held else 0
        if num_tokens > limits.max_model_len or max(sequence.token_ids[num_computed:], default=0) >= limits.vocab_size:
            return False
        num_needed = blocks_needed(num_tokens, limits.block_size)
        while not self._has_room(sequence, num_needed):
            if not self._evict():
                return False
        # It may have been evicted.
        held = self._held.get(sequence.id)
        if held is None:
            held = self._held[sequence.id] = _Held(self._free_slots.pop(), self._round)
        held.used = self._round
        self._held.move_to_end(sequence.id)
        held.block_table += [self._free_blocks.pop() for _ in range(num_needed - len(held.block_table))]
        return True

    def _has_room(self, sequence: Sequence, num_blocks: int) -> bool:
        """Whether `sequence` has, or can get, a slot and `num_blocks` blocks."""
        held = self._held.get(sequence.id)
        if held is None:
            return bool(self._free_slots) and num_blocks <= len(self._free_blocks)
        return num_blocks - len(held.block_table) <= len(self._free_blocks)

    def _evict(self) -> bool:
        """Free the slot and blocks of the sequence guessed the longest time ago; False if it was guessed lately."""
        sequence_id, held = next(iter(self._held.items()), (-1, None))
        if held is None or self._round - held.used <= KEPT_FOR:
            return False
        del self._held[sequence_id]
        self._free_slots.append(held.slot)
        self._free_blocks += held.block_table
        return True

    def _first_step(self, depths: Items[tuple[Sequence, int]]) -> tuple[Batch, list[_Row]]:
        """Return a step that computes the tokens that the model has not seen, and its rows that sample.

        Those that lack the fewest tokens come first.
        """
        rows: list[ScheduledRow] = []
        admissions: list[Admission] = []
        drafting: list[_Row] = []
        num_left = self._step_limits.max_num_batched_tokens
        for sequence, depth in sorted(depths, key=lambda pair: self._num_lacking(pair[0])):
            held, num_owed = self._held[sequence.id], self._num_lacking(sequence)
            start, num_tokens = len(sequence.token_ids) - num_owed, min(num_owed, num_left)
            if num_tokens == 0:
                break
            row = ScheduledRow(held.slot, next(self._generations), start, num_tokens, num_tokens == num_owed)
            rows.append(row)
            admissions.append(_admission(row, sequence, held))
            if row.samples:
                drafting.append((row, sequence, depth))
            num_left -= num_tokens
            held.num_read_tokens = start + num_tokens
        return Batch(tuple(rows), admissions=tuple(admissions)), drafting

    def _num_lacking(self, sequence: Sequence) -> int:
        """Return how many tokens are to be computed: at least the last, after which the first guess is drawn."""
        return max(1, len(sequence.token_ids) - self._held[sequence.id].num_read_tokens)

    def _compute(self, batch: Batch) -> list[Sampled]:
        began_s = self._clock()
        sampled = self._executor.launch(batch).collect()
        if batch.num_tokens <= _PLAIN * len(batch.rows):
            self._num_steps += 1
            self.step_s += (self._clock() - began_s - self.step_s) / min(self._num_steps, _MEMORY)
        return sampled


def _admission(row: ScheduledRow, sequence: Sequence, held: _Held) -> Admission:
    return Admission(
        slot=row.slot,
        sequence_id=row.sequence_id,
        request_id=sequence.request_id,
        choice=sequence.choice,
        sampling=_GREEDY,
        cache_salt=sequence.cache_salt,
        token_ids=tuple(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        block_ids=tuple(held.block_table),
    )
