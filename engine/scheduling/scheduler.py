"""Decide which sequences run in the next step, and how many tokens each computes.

Knows nothing of tensors, text or queues: it counts tokens and blocks.

There is no prefill and no decode phase: a sequence is owed the tokens that it has not computed yet, one or thousands. A
step is planned with two operations, `run` for running sequences and `join` for waiting ones, both in the policy's
order. The batching discipline (`engine.scheduling.disciplines`) decides which of them, when and with what budget. The
rest of this text describes the default, `continuous`.

Running sequences are scheduled first, then waiting ones. A prompt longer than the step's budget is split into chunks,
and a chunk leaves one token for each running sequence after it, so that a prompt never stalls generation (chunked
prefill: Agrawal et al., Sarathi-Serve, OSDI 2024). A sequence joins only when the blocks of its whole prompt are
available, and gets them all at once. A sequence that cannot get a further block takes one from the last running
sequence in the order, which is recomputed later (preemption by recomputation: Kwon et al., vLLM, SOSP 2023).

No sequence starves. The first in the order can take blocks from all others and fits the cache alone, so it computes at
least one token in every step and ends after at most ceil(tokens / chunk) + max_tokens steps. Then the next one is
first.

A step may be planned while the previous one is in flight (`launch`, `land`; an executor with lag 1). Then the last
token of a sequence may be known only to the device: it is counted (`Sequence.num_drawn_tokens`), and work that needs
its id waits a step (`_num_blind_tokens`). Blocks of a sequence are released only after every in-flight step that uses
them has completed. So a failed step can be retried unchanged, the row of an ended sequence overwrites nothing that is
in use, and a preempted sequence still gets its token. The cost: a sequence that needs such a block misses one step, so
the first in the order computes a token in at least every second step.

Hot module: no logging, no allocation per sequence and step except its `ScheduledRow`.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import chain

from sluice.engine.batch import Batch, BlockCopy, Sampled, ScheduledRow
from sluice.engine.config import EngineConfig
from sluice.engine.executor import ModelLimits
from sluice.engine.scheduling.block_manager import BlockManager
from sluice.engine.scheduling.disciplines import Cut, make_discipline
from sluice.engine.scheduling.policies import Policy, make_policy
from sluice.engine.scheduling.row_slots import RowSlots
from sluice.engine.scheduling.step_budget import StepBudget
from sluice.engine.sequence import Sequence, SequenceStatus

_LEAST_SHARED_TOKENS = 32
"""Sharing fewer tokens is not worth a step of waiting."""

_MOST_HELD_BACK = 16
"""Sequences that one step skips because another computes their prefix. Each costs a look into the prefix index."""

_MOST_OVERTAKEN = 64
"""Sequences that may join past one that is held back."""


@dataclass(slots=True, eq=False)
class WaitingQueue:
    """Sequences without blocks, in the policy's order. Mutable."""

    policy: Policy
    _heap: list[tuple[tuple[float, int], Sequence]] = field(default_factory=list[tuple[tuple[float, int], Sequence]])

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def head(self) -> Sequence:
        """The next sequence to join. The queue must not be empty."""
        return self._heap[0][1]

    def push(self, sequence: Sequence) -> None:
        """Insert `sequence` at its position."""
        heappush(self._heap, (self.policy.order(sequence), sequence))

    def pop(self) -> Sequence:
        """Remove the head."""
        return heappop(self._heap)[1]

    def keep_waiting(self) -> None:
        """Drop sequences that are no longer waiting."""
        self._heap = [entry for entry in self._heap if entry[1].status is SequenceStatus.WAITING]
        heapify(self._heap)

    def in_order(self) -> list[Sequence]:
        """Return all waiting sequences, the head first."""
        return [sequence for _, sequence in sorted(self._heap)]


@dataclass(slots=True, eq=False)
class SchedulerCounters:
    """Counts since the engine was created. Mutable."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of the sequences that were scheduled."""

    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


class Scheduler:
    """Running and waiting sequences. Read `schedule` first."""

    def __init__(self, config: EngineConfig, limits: ModelLimits, clock: Callable[[], float]) -> None:
        self._config = config
        self._policy = make_policy(config)
        self._discipline = make_discipline(config, limits)
        self._clock = clock
        self._max_model_len = limits.max_model_len
        self._num_preemptions_before = 0
        self._budget = StepBudget(config.max_num_batched_tokens)
        self.blocks = BlockManager(
            limits.num_blocks, limits.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        # Those that leave keep theirs while a step in flight has them.
        self._slots = RowSlots(2 * config.max_num_seqs)
        self.running: list[Sequence] = []
        """In the policy's order; for first come, first served this is the order of admission."""

        self.leaving: list[Sequence] = []
        """Preempted or finished sequences with a row in a step in flight: they release their blocks when it lands."""

        self.waiting = WaitingQueue(self._policy)
        self.counters = SchedulerCounters()

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.num_blind_tokens = self._num_blind_tokens(sequence)
        self.waiting.push(sequence)

    def schedule(self) -> Batch:
        """Plan one step. No token counts as computed before `commit`, so a failed step has changed nothing."""
        self._num_preemptions_before = self.counters.num_preemptions
        batch = self._discipline.plan(self)
        if self.blocks.num_pending_copies:
            batch = self._with_copies(batch)
        return self._slots.with_writes(batch)

    def shrink(self, batch: Batch) -> None:
        """Plan smaller steps for a while: the device lacked memory for `batch`, of which nothing was computed.

        Sequences at the end of the order that no longer fit are preempted.
        """
        self._budget.shrink(batch.num_tokens)
        while len(self.running) > self._budget.tokens:
            self._preempt(self.running.pop())

    # ------------------------------------------------------------ operations of a batching discipline

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none, or are about to join."""
        return len(self.waiting) + sum(sequence.status is SequenceStatus.LEAVING for sequence in self.leaving)

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a step at present."""
        return self._budget.tokens

    @property
    def now_s(self) -> float:
        """The time on the engine's clock."""
        return self._clock()

    def run(self) -> list[ScheduledRow]:
        """Schedule all running sequences; one that lacks a block takes it from the last in the order."""
        return self._schedule(self.running)

    def run_prompts(self) -> list[ScheduledRow]:
        """Schedule running sequences that owe more than one token. They hold all the blocks they need."""
        return self._schedule([sequence for sequence in self.running if sequence.num_uncomputed_tokens > 1])

    def join(self, scheduled: Iterable[ScheduledRow], cut: Cut, *, holds_back: bool = True) -> list[ScheduledRow]:
        """Schedule waiting sequences after those `scheduled` in this step; none after a preemption.

        Args:
            scheduled: sequences that compute in this step already.
            cut: how many of its owed tokens a prompt computes now, at most the second number; 0: it waits.
            holds_back: whether a sequence waits for a prefix that another one computes in this step or in one in
                flight.
        """
        if not self.waiting or self.counters.num_preemptions > self._num_preemptions_before:
            return []
        tokens_left = self.max_tokens - sum(row.num_tokens for row in scheduled)
        computing = [self._slots[row] for row in scheduled if row.num_tokens > 1]
        computing += [sequence for sequence in self.running if sequence.num_launched_tokens > 1]
        return self._schedule_waiting(tokens_left, cut, self._coming(computing) if holds_back else None)

    def chunk(self, num_owed: int, tokens_left: int) -> int:
        """Return how many of its owed tokens a sequence computes when `tokens_left` are left of the step's budget."""
        threshold = self._config.long_prefill_token_threshold
        if threshold and len(self.running) + len(self.waiting) > 1:
            tokens_left = min(tokens_left, threshold)
        return min(num_owed, tokens_left)

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

    @property
    def may_overlap(self) -> bool:
        """Whether a step may be planned while the previous one is in flight."""
        return self._discipline.may_overlap

    @property
    def known(self) -> list[Sequence]:
        """All sequences that are not finished: running, leaving and waiting."""
        leaving = [sequence for sequence in self.leaving if sequence.status is SequenceStatus.LEAVING]
        return [*self.running, *leaving, *self.waiting.in_order()]

    @property
    def ended_ids(self) -> set[int]:
        """Ids of finished sequences that still have a row in a step in flight; the row is discarded."""
        return {sequence.id for sequence in self.leaving if sequence.status is SequenceStatus.FINISHED}

    @property
    def num_spare_blocks(self) -> int:
        """Blocks kept free when a sequence joins: one per growing sequence, so that it causes no preemption."""
        return len(self.running) if self._discipline.may_grow else 0

    @property
    def num_places(self) -> int:
        """How many more sequences can start in the next steps."""
        return self._discipline.num_places(self)

    @property
    def gathering_s(self) -> float:
        """Seconds for which a step would compute nothing although sequences wait: their batch is still open."""
        return self._discipline.gathering_s(self)

    def num_held_tokens(self) -> int:
        """Return the tokens that waiting sequences will reserve when they join."""
        return sum(self._discipline.num_held_tokens(sequence) for sequence in self.waiting.in_order())

    def num_owed_tokens(self) -> int:
        """Return the tokens that all known sequences still owe; one for each that generates."""
        known = chain(self.running, self.waiting.in_order())
        return sum(sequence.num_uncomputed_tokens for sequence in known)

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

    def _schedule(self, sequences: list[Sequence]) -> list[ScheduledRow]:
        scheduled: list[ScheduledRow] = []
        tokens_left = self.max_tokens
        # A victim is always the last running sequence: it is taken from the end that the loop has not reached.
        for sequence in sequences:
            start = sequence.num_computed_tokens
            num_tokens = num_owed = len(sequence.token_ids) - start
            if num_launched := sequence.num_launched_tokens:
                num_drawn = sequence.num_drawn_tokens
                if num_drawn and start + num_owed + num_drawn > sequence.num_blind_tokens:
                    continue
                start += num_launched
                num_tokens = num_owed = num_owed + num_drawn - num_launched
            if num_owed > 1:
                num_behind = len(sequences) - len(scheduled) - 1
                num_tokens = self.chunk(num_owed, tokens_left - num_behind)
            if start + num_tokens > sequence.num_slots and not self._grow(sequence, start + num_tokens):
                continue
            scheduled.append(ScheduledRow(sequence.slot, sequence.id, start, num_tokens, num_tokens == num_owed))
            tokens_left -= num_tokens
        return scheduled

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

    def _num_blind_tokens(self, sequence: Sequence) -> int:
        """Return `Sequence.num_blind_tokens`: nothing is planned past the last token; penalties need every token."""
        if sequence.sampling.has_penalties:
            return 0
        return min(sequence.num_prompt_tokens + sequence.sampling.max_tokens, self._max_model_len) - 1

    def _schedule_waiting(self, tokens_left: int, cut: Cut, coming: dict[int, Sequence] | None) -> list[ScheduledRow]:
        scheduled: list[ScheduledRow] = []
        held_back: list[Sequence] = []
        # Every running sequence must find a token in each step's budget, even if this step has none for it.
        most = min(self._config.max_num_seqs, self.max_tokens)
        while self.waiting and tokens_left > 0 and len(self.running) < most and _may_overtake(held_back):
            sequence = self.waiting.head
            if coming is not None and self._is_better_held_back(sequence, coming):
                held_back.append(self.waiting.pop())
                continue
            num_owed = sequence.num_tokens - self.blocks.num_known_tokens(sequence)
            # If no sequence runs, waiting does not free more budget.
            num_tokens = cut(num_owed, tokens_left) or (0 if self.running else min(num_owed, tokens_left))
            if num_tokens == 0 or not self._hold(sequence):
                break  # keep the order: no sequence overtakes one that only lacks room
            num_cached = sequence.num_tokens - num_owed
            self._join(sequence, num_cached)
            if coming is not None:
                coming |= self._coming([sequence])
            scheduled.append(ScheduledRow(sequence.slot, sequence.id, num_cached, num_tokens, num_tokens == num_owed))
            tokens_left -= num_tokens
            for other in held_back:
                other.num_overtaken += 1
        for sequence in held_back:
            self.waiting.push(sequence)
        return scheduled

    def _hold(self, sequence: Sequence) -> bool:
        num_held = self._discipline.num_held_tokens(sequence)
        return self.blocks.try_hold(sequence, num_spare=self.num_spare_blocks, num_held=num_held) is not None

    def _coming(self, computing: list[Sequence]) -> dict[int, Sequence]:
        """Map the next hash to be published to the sequence that computes it."""
        coming = {self.blocks.next_hash(sequence): sequence for sequence in computing}
        return {key: sequence for key, sequence in coming.items() if key is not None}

    def _is_better_held_back(self, sequence: Sequence, coming: dict[int, Sequence]) -> bool:
        """Whether another sequence is computing at least half of what `sequence` would compute, to be shared.

        So the choices of a request, or a burst of requests with one system prompt, compute their prompt once (in-batch
        prefix sharing: Zheng et al., SGLang, NeurIPS 2024). The wait lasts as long as the other sequence's prefill.
        """
        key = self.blocks.next_hash(sequence) if coming else None
        other = coming.get(key) if key is not None else None
        if other is None:
            return False
        num_coming = self.blocks.num_coming_tokens(sequence, other)
        num_owed = sequence.num_tokens - self.blocks.num_known_tokens(sequence)
        return num_coming >= max(_LEAST_SHARED_TOKENS, num_owed / 2)

    def _join(self, sequence: Sequence, num_cached: int) -> None:
        self.waiting.pop()
        insort(self.running, sequence, key=self._policy.order)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = num_cached
        self._slots.assign(sequence)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = self._clock()
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
            self.counters.num_cached_tokens += sequence.num_cached_tokens
        elif sequence.num_preemptions:
            sequence.preemptions = sequence.preemptions.end(self._clock())

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
        victim.num_preemptions += 1
        victim.preemptions = victim.preemptions.begin(self._clock())
        self.counters.num_preemptions += 1
        if victim.num_launched_tokens:
            victim.status = SequenceStatus.LEAVING
            self.leaving.append(victim)
        else:
            self._let_wait(victim)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        if sequence.slot >= 0:
            self._slots.release(sequence)

    def _let_wait(self, victim: Sequence) -> None:
        """Release the blocks of a preempted sequence and queue it for recomputation."""
        self._release(victim)
        victim.num_computed_tokens = 0
        victim.status = SequenceStatus.WAITING
        self.waiting.push(victim)


def _may_overtake(held_back: list[Sequence]) -> bool:
    """Return whether one more sequence may join past those that are held back."""
    return len(held_back) <= _MOST_HELD_BACK and all(other.num_overtaken < _MOST_OVERTAKEN for other in held_back)
