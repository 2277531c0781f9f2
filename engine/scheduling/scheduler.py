"""The life of sequences in the engine: they wait, run, are preempted, and end. Knows no tensors, text or queues.

A scheduler plans steps (`schedule`), and is told what became of them: `commit` for what succeeded, `finish` for
sequences that ended. What is the same for all schedulers is here. `sluice.engine.scheduling.continuous` plans the steps
of a worker; those in `sluice.engine.scheduling.comparison` are there to be compared with it.

A step may be planned while the previous one is in flight (`launch`, `land`; an executor with lag 1). Then the last
token of a sequence may be known only to the device: it is counted (`Sequence.num_drawn_tokens`). A sequence keeps its
blocks and its row slot until every step in flight that uses them has landed. So a failed step can be retried unchanged,
the row of an ended sequence overwrites nothing that is in use, and a preempted sequence still gets its token.

Hot module: no logging, no allocation per sequence and step except its `ScheduledRow`.
"""

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain

from sluice.engine.batch import Batch, BlockCopy, Sampled, ScheduledRow
from sluice.engine.config import EngineConfig
from sluice.engine.executor import ModelLimits
from sluice.engine.request import Room
from sluice.engine.scheduling.block_manager import BlockManager, CachedPrefix
from sluice.engine.scheduling.policies import make_policy
from sluice.engine.scheduling.row_slots import RowSlots
from sluice.engine.scheduling.step_budget import StepBudget
from sluice.engine.scheduling.waiting_queue import WaitingQueue
from sluice.engine.sequence import Sequence, SequenceStatus

_NO_ROOM = Room(kv_tokens=0, prefill_tokens=0, sequences=0)


@dataclass(slots=True, eq=False)
class SchedulerCounters:
    """Counts since the engine was created. Mutable."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of the sequences that were scheduled."""

    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


class Scheduler(ABC):
    """Running and waiting sequences. Mutable."""

    may_overlap = False
    """Whether a step may be planned while the previous one is in flight."""

    gathering_s = 0.0
    """Seconds for which a step would compute nothing although sequences wait: their batch is still open."""

    def __init__(self, config: EngineConfig, limits: ModelLimits, clock: Callable[[], float]) -> None:
        self._config = config
        self._limits = limits
        self._clock = clock
        self._policy = make_policy(config)
        self._budget = StepBudget(config.max_num_batched_tokens)
        # Those that leave keep theirs while a step in flight has them.
        self._slots = RowSlots(2 * config.max_num_seqs)
        self.blocks = BlockManager(
            limits.num_blocks, limits.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self.running: list[Sequence] = []
        """In the policy's order; for first come, first served this is the order of admission."""

        self.leaving: list[Sequence] = []
        """Preempted or finished sequences with a row in a step in flight: they release their blocks when it lands."""

        self.waiting = WaitingQueue(self._policy)
        self.counters = SchedulerCounters()

    # ------------------------------------------------------------ what the engine calls

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.num_blind_tokens = self._num_blind_tokens(sequence)
        self.waiting.push(sequence)

    def schedule(self) -> Batch:
        """Plan one step. No token counts as computed before `commit`, so a failed step has changed nothing."""
        batch = self._plan()
        if self.blocks.num_pending_copies:
            batch = self._with_copies(batch)
        return self._slots.with_writes(batch)

    def launch(self, batch: Batch) -> None:
        """Record that a step is in flight while the next one is planned."""
        for sequence, (_, _, _, num_tokens, samples) in zip(self._slots.of(batch), batch.rows, strict=True):
            sequence.num_launched_tokens += num_tokens
            sequence.num_drawn_tokens += samples

    def land(self, batch: Batch) -> None:
        """Record that a step in flight has completed: successes are committed, the rest is planned again.

        Sequences that left meanwhile, and are in no other step in flight, release their blocks.
        """
        for sequence, (_, _, _, num_tokens, samples) in zip(self._slots.of(batch), batch.rows, strict=True):
            sequence.num_launched_tokens -= num_tokens
            sequence.num_drawn_tokens -= samples
        landed = [sequence for sequence in self.leaving if not sequence.num_launched_tokens]
        if not landed:
            return
        self.leaving[:] = [sequence for sequence in self.leaving if sequence.num_launched_tokens]
        for sequence in landed:
            if sequence.status is SequenceStatus.LEAVING:
                self._let_wait(sequence)
            else:
                self._release(sequence)

    def commit(self, batch: Batch, sampled: list[Sampled]) -> None:
        """Advance the sequences of a successful step by what it computed and sampled."""
        self._budget.note_success()
        self._slots.confirm(batch)
        if batch.copies:
            self._end_copies(batch)
        results = iter(sampled)
        block_size = self.blocks.block_size
        for sequence, (_, _, start, num_tokens, samples) in zip(self._slots.of(batch), batch.rows, strict=True):
            sequence.num_computed_tokens = num_computed = start + num_tokens
            if samples:
                sequence.token_ids += next(results).token_ids
            # A single token fills a block only at its end.
            if num_tokens > 1 or num_computed % block_size == 0:
                self.blocks.publish(sequence)

    def finish(self, sequences: Iterable[Sequence], *, suspects: Iterable[Sequence] = ()) -> None:
        """Release `sequences`, running or waiting.

        Args:
            sequences: each is known and not finished.
            suspects: those whose keys and values may be wrong (NaN): their blocks are removed from the prefix index.
        """
        for sequence in suspects:
            self.blocks.retract(sequence)
        some_waited = False
        for sequence in sequences:
            some_waited |= sequence.status is SequenceStatus.WAITING
            if not sequence.num_launched_tokens:
                self._release(sequence)
            elif sequence.status is SequenceStatus.RUNNING:
                self.leaving.append(sequence)
            sequence.status = SequenceStatus.FINISHED
        self.running[:] = [sequence for sequence in self.running if sequence.status is SequenceStatus.RUNNING]
        if some_waited:
            self.waiting.keep_waiting()

    def shrink(self, batch: Batch) -> None:
        """Plan smaller steps for a while: the device lacked memory for `batch`, of which nothing was computed.

        Sequences at the end of the order that no longer fit are preempted.
        """
        self._budget.shrink(batch.num_tokens)
        while len(self.running) > self._budget.tokens:
            self._preempt(self.running.pop())

    def room(self) -> Room:
        """Return what can start within the next steps; all zero while any sequence waits for room."""
        num_places = self.num_places
        if num_places == 0:
            return _NO_ROOM
        waiting = self.waiting.in_order()
        budget = self._config.max_num_batched_tokens
        offered = budget + (self._config.max_waiting_tokens or budget)
        num_owed = sum(sequence.num_uncomputed_tokens for sequence in chain(self.running, waiting))
        num_held = sum(self._num_held_tokens(sequence) for sequence in waiting)
        num_free_blocks = self.blocks.num_free_blocks - self._num_spare_blocks
        return Room(
            kv_tokens=max(0, num_free_blocks * self.blocks.block_size - num_held),
            prefill_tokens=max(0, offered - num_owed),
            sequences=num_places,
        )

    @property
    def num_places(self) -> int:
        """How many more sequences can start in the next steps.

        None while any sequence waits: jobs not taken stay visible to other workers.
        """
        return 0 if self.num_waiting else self._config.max_num_seqs - len(self.running)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks, or about to be."""
        return len(self.waiting) + sum(sequence.status is SequenceStatus.LEAVING for sequence in self.leaving)

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a step at present."""
        return self._budget.tokens

    @property
    def known(self) -> list[Sequence]:
        """All sequences that are not finished: running, leaving and waiting."""
        leaving = [sequence for sequence in self.leaving if sequence.status is SequenceStatus.LEAVING]
        return [*self.running, *leaving, *self.waiting.in_order()]

    @property
    def ended_ids(self) -> set[int]:
        """Ids of finished sequences that still have a row in a step in flight; the row is discarded."""
        return {sequence.id for sequence in self.leaving if sequence.status is SequenceStatus.FINISHED}

    def check_invariants(self) -> None:
        """Check the invariants of blocks and sequences.

        Raises:
            AssertionError: an invariant is violated.
        """
        self.blocks.check_invariants([*self.running, *self.leaving])
        self._slots.check_invariants([*self.running, *self.leaving])
        orders = [self._policy.order(sequence) for sequence in self.running]
        assert orders == sorted(set(orders)), "the running sequences are out of order"
        assert len(self.running) <= self._config.max_num_seqs, "more sequences run than max_num_seqs"
        assert len(self.running) <= self.max_tokens, "more sequences run than a step has tokens for"
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.num_slots == len(sequence.block_table) * self.blocks.block_size
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens
            assert sequence.num_computed_tokens + sequence.num_launched_tokens <= sequence.num_slots
            assert sequence.num_uncomputed_tokens > 0, "a running sequence owes no tokens"
        for sequence in self.leaving:
            assert sequence.status in (SequenceStatus.LEAVING, SequenceStatus.FINISHED)
            assert sequence.num_launched_tokens, "a leaving sequence is in no step in flight"
        for sequence in self.waiting.in_order():
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.block_table, "a waiting sequence holds blocks"
            assert sequence.slot < 0, "a waiting sequence has a row slot"
            assert sequence.cow_source is None, "a waiting sequence holds the source of a copy"
            assert sequence.num_computed_tokens == 0

    # ------------------------------------------------------------ what a scheduler decides

    @abstractmethod
    def _plan(self) -> Batch:
        """Plan the next step; empty if there is nothing to compute."""

    def _num_held_tokens(self, sequence: Sequence) -> int:
        """Return the tokens that `sequence` gets blocks for when it joins: at least its own, at most the cache's."""
        return len(sequence.token_ids)

    @property
    def _num_spare_blocks(self) -> int:
        """Blocks kept free when a sequence joins: one per growing sequence, so that it causes no preemption."""
        return len(self.running)

    # ------------------------------------------------------------ transitions

    def _try_join(self, sequence: Sequence, found: CachedPrefix, num_tokens: int) -> ScheduledRow | None:
        """Let the head of the queue run, and compute `num_tokens`; None if there are not enough blocks for it.

        Args:
            sequence: popped from the queue by the caller if it joins.
            found: what `self.blocks` has cached of it.
            num_tokens: 1 or more.
        """
        num_held = self._num_held_tokens(sequence)
        if not self.blocks.try_hold(sequence, found, num_spare=self._num_spare_blocks, num_held=num_held):
            return None
        insort(self.running, sequence, key=self._policy.order)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = found.num_tokens
        self._slots.assign(sequence)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = self._clock()
            sequence.num_cached_tokens = min(found.num_tokens, sequence.num_prompt_tokens)
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
            self.counters.num_cached_tokens += sequence.num_cached_tokens
        elif sequence.num_preemptions:
            sequence.preemptions = sequence.preemptions.end(self._clock())
        num_owed = len(sequence.token_ids) - found.num_tokens
        return ScheduledRow(sequence.slot, sequence.id, found.num_tokens, num_tokens, num_tokens == num_owed)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get `sequence` blocks for `num_tokens`, preempting from the end of the order if necessary.

        False if `sequence` itself was preempted, or if it must skip this step because leaving sequences will release
        blocks.
        """
        while not self.blocks.try_grow(sequence, num_tokens):
            if self.leaving:
                return False
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        self._slots.note_growth(sequence)
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Take the blocks of `victim`, which the caller has removed from the running ones."""
        victim.num_preemptions += 1
        victim.preemptions = victim.preemptions.begin(self._clock())
        self.counters.num_preemptions += 1
        if victim.num_launched_tokens:
            victim.status = SequenceStatus.LEAVING
            self.leaving.append(victim)
        else:
            self._let_wait(victim)

    def _let_wait(self, victim: Sequence) -> None:
        """Release the blocks of a preempted sequence and queue it for recomputation."""
        self._release(victim)
        victim.num_computed_tokens = 0
        victim.status = SequenceStatus.WAITING
        self.waiting.push(victim)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        if sequence.slot >= 0:
            self._slots.release(sequence)

    def _num_blind_tokens(self, sequence: Sequence) -> int:
        """Return `Sequence.num_blind_tokens`: nothing is planned past the last token; penalties need every token."""
        if sequence.sampling.has_penalties:
            return 0
        longest = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        return min(longest, self._limits.max_model_len) - 1

    def _with_copies(self, batch: Batch) -> Batch:
        """Add the pending copies of the batch's sequences, in each step until one with the copy has succeeded.

        A step in flight already makes its copies and may have written to the destinations.
        """
        size = self.blocks.block_size
        copies = [
            BlockCopy(sequence.id, sequence.cow_source, sequence.block_table[row.start // size])
            for sequence, row in zip(self._slots.of(batch), batch.rows, strict=True)
            if sequence.cow_source is not None and not sequence.num_launched_tokens
        ]
        return replace(batch, copies=tuple(copies))

    def _end_copies(self, batch: Batch) -> None:
        copied = {copy.sequence_id for copy in batch.copies}
        for row in batch.rows:
            if row.sequence_id in copied:
                self.blocks.end_copy(self._slots[row])
