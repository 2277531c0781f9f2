"""Decide which sequences run in the next step, and how many tokens each computes.

Knows nothing of tensors, text or queues: it counts tokens and blocks.

There is no prefill and no decode here: a sequence is owed the tokens that it has not computed yet, one or thousands.
A step is planned from two verbs, `run` for those that run and `join` for those that wait, both in the policy's order;
which of them, when and with what room is the batching discipline's (`engine.policies.disciplines`). What follows is
said of `continuous`, the one to use.

Those that run go first, then those that wait. A prompt longer than the step's budget is cut in chunks, and a chunk
leaves a token for each running sequence behind it, so that a prompt never stalls those that generate (chunked prefill:
Agrawal et al., Sarathi-Serve, OSDI 2024). A sequence joins only when the blocks of its whole prompt are there, and gets
them all at once. One that cannot get a further block takes it from the sequence that is last in the order, which is
recomputed later (preemption by recomputation: Kwon et al., vLLM, SOSP 2023).

No sequence starves. The first in the order can take from all others and fits the cache alone, so it computes at least
one token in every step: it ends after at most ceil(tokens / chunk) + max_tokens steps. Then the next one is first.

A step may be planned while the one before is in flight (`launch`, `land`; an executor with lag 1). Then the last token
of a sequence may be one that only the device has: it counts (`Sequence.num_drawn_tokens`), and what cannot do without
its id waits a step (`_num_blind_tokens`). One rule keeps the rest safe: whoever has a row in a step in flight keeps its
blocks until that step is over, whatever becomes of it. So a step that fails can be tried again as it was, a row that
nobody wants any more writes where it harms nobody, and a preempted sequence still gets its token. The price: who needs
such a block misses one step. So the first in the order computes a token in every second step at least.

Hot module: no logging, no allocation per sequence and step but its `ScheduledSequence`.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import chain

from engine.batch import Batch, BlockCopy, Sampled, ScheduledSequence
from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.executor import ModelLimits
from engine.policies import Policy, make_policy
from engine.policies.disciplines import Cut, make_discipline
from engine.sequence import Sequence, SequenceStatus
from engine.step_budget import StepBudget

_LEAST_SHARED_TOKENS = 32
"""To share fewer is not worth a step of waiting."""


@dataclass(slots=True, eq=False)
class WaitingQueue:
    """Sequences without blocks, in the policy's order. Changes as they come and go."""

    policy: Policy
    _heap: list[tuple[tuple[float, int], Sequence]] = field(default_factory=list[tuple[tuple[float, int], Sequence]])

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def head(self) -> Sequence:
        """Who goes first. The caller knows that somebody waits."""
        return self._heap[0][1]

    def push(self, sequence: Sequence) -> None:
        """Let `sequence` wait at its place."""
        heappush(self._heap, (self.policy.order(sequence), sequence))

    def pop(self) -> Sequence:
        """Take the head."""
        return heappop(self._heap)[1]

    def keep_waiting(self) -> None:
        """Drop those that no longer wait."""
        self._heap = [entry for entry in self._heap if entry[1].status is SequenceStatus.WAITING]
        heapify(self._heap)

    def in_order(self) -> list[Sequence]:
        """All that wait, the head first."""
        return [sequence for _, sequence in sorted(self._heap)]


@dataclass(slots=True, eq=False)
class SchedulerCounters:
    """What happened since the engine was made. Changes as it happens."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of the sequences that were scheduled."""

    num_cached_tokens: int = 0
    """Those of them that the prefix cache had."""


class Scheduler:
    """Who runs and who waits. Read `schedule` first."""

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
        self.running: list[Sequence] = []
        """In the policy's order, which is the order of admission where the policy is first come, first served."""

        self.leaving: list[Sequence] = []
        """Preempted or finished, and in a step in flight: they give their blocks back when it lands."""

        self.waiting = WaitingQueue(self._policy)
        self.counters = SchedulerCounters()

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait."""
        sequence.num_blind_tokens = self._num_blind_tokens(sequence)
        self.waiting.push(sequence)

    def schedule(self) -> Batch:
        """Plan one step. Until `commit`, no token counts as computed, so a step that fails has changed nothing."""
        self._num_preemptions_before = self.counters.num_preemptions
        batch = self._discipline.plan(self)
        return self._with_copies(batch) if self.blocks.num_pending_copies else batch

    def shrink(self, batch: Batch) -> None:
        """Plan smaller steps for a while: the device had no memory for `batch`, of which nothing was computed.

        Who does not fit them any more, the last in the order, is preempted.
        """
        self._budget.shrink(batch.num_tokens)
        while len(self.running) > self._budget.tokens:
            self._preempt(self.running.pop())

    # ------------------------------------------------------------ what a discipline plans a step from

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none, or are about to."""
        return len(self.waiting) + sum(sequence.status is SequenceStatus.LEAVING for sequence in self.leaving)

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step, now."""
        return self._budget.tokens

    @property
    def now_s(self) -> float:
        """The time, on the engine's clock."""
        return self._clock()

    def run(self) -> list[ScheduledSequence]:
        """Schedule all that run; who cannot get a further block takes it from the last in the order."""
        return self._schedule(self.running)

    def run_prompts(self) -> list[ScheduledSequence]:
        """Schedule those of the running that owe more than one token. They have all the blocks that they need."""
        return self._schedule([sequence for sequence in self.running if sequence.num_uncomputed_tokens > 1])

    def join(
        self, scheduled: Iterable[ScheduledSequence], cut: Cut, *, holds_back: bool = True
    ) -> list[ScheduledSequence]:
        """Let those that wait join those `scheduled` in this step; nobody after a preemption.

        Args:
            scheduled: whoever computes in this step already.
            cut: how many of its owed tokens a prompt computes now, at most the second number; 0: it waits.
            holds_back: whether one waits for a prefix that another computes in this step or in one in flight.
        """
        if not self.waiting or self.counters.num_preemptions > self._num_preemptions_before:
            return []
        tokens_left = self.max_tokens - sum(one.num_tokens for one in scheduled)
        computing = [one.sequence for one in scheduled if one.num_tokens > 1]
        computing += [sequence for sequence in self.running if sequence.num_launched_tokens > 1]
        return self._schedule_waiting(tokens_left, cut, self._coming(computing) if holds_back else None)

    def chunk(self, num_owed: int, tokens_left: int) -> int:
        """How many of its owed tokens a sequence computes where `tokens_left` are left of the step's budget."""
        threshold = self._config.long_prefill_token_threshold
        if threshold and len(self.running) + len(self.waiting) > 1:
            tokens_left = min(tokens_left, threshold)
        return min(num_owed, tokens_left)

    def launch(self, batch: Batch) -> None:
        """Take note that a step is in flight while the next one is planned."""
        for sequence, _, num_tokens, samples in batch.sequences:
            sequence.num_launched_tokens += num_tokens
            sequence.num_drawn_tokens += samples

    def land(self, batch: Batch) -> None:
        """Take note that a step in flight is over: what went well of it is committed, the rest is to be planned again.

        Those that left meanwhile, and are in no other step in flight, give their blocks back.
        """
        for sequence, _, num_tokens, samples in batch.sequences:
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
                self.blocks.release(sequence)

    def commit(self, batch: Batch, sampled: list[Sampled]) -> None:
        """Move the sequences of a step that succeeded on by what it computed and drew."""
        self._budget.note_success()
        if batch.copies:
            self._end_copies(batch)
        rows = iter(sampled)
        block_size = self.blocks.block_size
        for sequence, start, num_tokens, samples in batch.sequences:
            sequence.num_computed_tokens = num_computed = start + num_tokens
            if samples:
                sequence.token_ids += next(rows).token_ids
            # One token fills a block at its end only.
            if num_tokens > 1 or num_computed % block_size == 0:
                self.blocks.publish(sequence)

    def finish(self, sequences: Iterable[Sequence], *, suspects: Iterable[Sequence] = ()) -> None:
        """Let `sequences` go, running or waiting.

        Args:
            sequences: each is known and not finished.
            suspects: those of them whose keys and values may be wrong (NaN): nobody may find them.
        """
        for sequence in suspects:
            self.blocks.retract(sequence)
        some_waited = False
        for sequence in sequences:
            some_waited |= sequence.status is SequenceStatus.WAITING
            if not sequence.num_launched_tokens:
                self.blocks.release(sequence)
            elif sequence.status is SequenceStatus.RUNNING:
                self.leaving.append(sequence)
            sequence.status = SequenceStatus.FINISHED
        self.running[:] = [sequence for sequence in self.running if sequence.status is SequenceStatus.RUNNING]
        if some_waited:
            self.waiting.keep_waiting()

    @property
    def may_overlap(self) -> bool:
        """Whether a step may be planned while the one before is in flight."""
        return self._discipline.may_overlap

    @property
    def known(self) -> list[Sequence]:
        """All that are not finished: those that run, those that leave, those that wait."""
        leaving = [sequence for sequence in self.leaving if sequence.status is SequenceStatus.LEAVING]
        return [*self.running, *leaving, *self.waiting.in_order()]

    @property
    def ended_ids(self) -> set[int]:
        """Sequences that are finished and still have a row in a step in flight, which nobody wants."""
        return {sequence.id for sequence in self.leaving if sequence.status is SequenceStatus.FINISHED}

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that stay free when a sequence joins: one for each that may grow, so that this preempts nobody."""
        return len(self.running) if self._discipline.may_grow else 0

    @property
    def num_places(self) -> int:
        """Sequences that may still come so that they start in the next steps."""
        return self._discipline.num_places(self)

    @property
    def gathering_s(self) -> float:
        """Seconds for which a step would compute nothing although sequences wait: their batch is not closed."""
        return self._discipline.gathering_s(self)

    def num_held_tokens(self) -> int:
        """Tokens whose slots those that wait will hold when they join."""
        return sum(self._discipline.num_held_tokens(sequence) for sequence in self.waiting.in_order())

    def num_owed_tokens(self) -> int:
        """Tokens that all known sequences have yet to compute, one each where they generate."""
        known = chain(self.running, self.waiting.in_order())
        return sum(sequence.num_uncomputed_tokens for sequence in known)

    def check_invariants(self) -> None:
        """Check the books of blocks and sequences.

        Raises:
            AssertionError: they do not balance.
        """
        self.blocks.check_invariants([*self.running, *self.leaving])
        orders = [self._policy.order(sequence) for sequence in self.running]
        assert orders == sorted(set(orders)), "the running sequences are out of order"
        assert len(self.running) <= self._config.max_num_seqs, "more sequences run than may"
        assert len(self.running) <= self.max_tokens, "more sequences run than a step has tokens for"
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.num_slots == len(sequence.block_table) * self.blocks.block_size
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens
            assert sequence.num_computed_tokens + sequence.num_launched_tokens <= sequence.num_slots
            assert sequence.num_uncomputed_tokens > 0, "nothing is left to plan of a sequence that runs"
        for sequence in self.leaving:
            assert sequence.status in (SequenceStatus.LEAVING, SequenceStatus.FINISHED)
            assert sequence.num_launched_tokens, "a sequence that left holds blocks that no step needs"
        for sequence in self.waiting.in_order():
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.block_table, "a waiting sequence holds blocks"
            assert sequence.copied_from is None, "a waiting sequence holds the source of a copy"
            assert sequence.num_computed_tokens == 0

    def _schedule(self, sequences: list[Sequence]) -> list[ScheduledSequence]:
        scheduled: list[ScheduledSequence] = []
        tokens_left = self.max_tokens
        # A victim is always the last of those that run: it is taken from the end that the loop has not reached.
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
            scheduled.append(ScheduledSequence(sequence, start, num_tokens, num_tokens == num_owed))
            tokens_left -= num_tokens
        return scheduled

    def _with_copies(self, batch: Batch) -> Batch:
        """`batch`, with the copies that its sequences wait for: again in each step until one of them has succeeded.

        What is in flight already has them, and has written behind them.
        """
        size = self.blocks.block_size
        copies = [
            BlockCopy(sequence.id, sequence.copied_from, sequence.block_table[start // size])
            for sequence, start, *_ in batch.sequences
            if sequence.copied_from is not None and not sequence.num_launched_tokens
        ]
        return replace(batch, copies=tuple(copies))

    def _end_copies(self, batch: Batch) -> None:
        copied = {copy.sequence_id for copy in batch.copies}
        for sequence, *_ in batch.sequences:
            if sequence.id in copied:
                self.blocks.end_copy(sequence)

    def _num_blind_tokens(self, sequence: Sequence) -> int:
        """See `Sequence.num_blind_tokens`. What follows the last token is not planned, and no penalty is guessed."""
        if sequence.sampling.has_penalties:
            return 0
        return min(sequence.num_prompt_tokens + sequence.sampling.max_tokens, self._max_model_len) - 1

    def _schedule_waiting(
        self, tokens_left: int, cut: Cut, coming: dict[int, Sequence] | None
    ) -> list[ScheduledSequence]:
        scheduled: list[ScheduledSequence] = []
        # Whoever runs must find a token in each step's budget, even if this step has nothing for it.
        most = min(self._config.max_num_seqs, self.max_tokens)
        while self.waiting and tokens_left > 0 and len(self.running) < most:
            sequence = self.waiting.head
            if coming is not None and self._is_better_held_back(sequence, coming):
                break
            num_owed = sequence.num_tokens - self.blocks.num_known_tokens(sequence)
            # Where nobody runs, none can wait for more room than there is.
            num_tokens = cut(num_owed, tokens_left) or (0 if self.running else min(num_owed, tokens_left))
            if num_tokens == 0 or not self._hold(sequence):
                break  # nobody overtakes the head
            num_cached = sequence.num_tokens - num_owed
            self._join(sequence, num_cached)
            if coming is not None:
                coming |= self._coming([sequence])
            scheduled.append(ScheduledSequence(sequence, num_cached, num_tokens, num_tokens == num_owed))
            tokens_left -= num_tokens
        return scheduled

    def _hold(self, sequence: Sequence) -> bool:
        num_held = self._discipline.num_held_tokens(sequence)
        return self.blocks.try_hold(sequence, num_spare=self.num_spare_blocks, num_held=num_held) is not None

    def _coming(self, computing: list[Sequence]) -> dict[int, Sequence]:
        """Prefixes that are being computed, by the hash of the next block that will be known."""
        coming = {self.blocks.next_hash(sequence): sequence for sequence in computing}
        return {key: sequence for key, sequence in coming.items() if key is not None}

    def _is_better_held_back(self, sequence: Sequence, coming: dict[int, Sequence]) -> bool:
        """Whether at least half of what `sequence` would compute is being computed by another one, to be shared.

        So the choices of a request, or a burst of requests with one system prompt, compute their prompt once
        (in-batch prefix sharing: Zheng et al., SGLang, NeurIPS 2024). The wait is that of the other's prefill.
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
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = self._clock()
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
            self.counters.num_cached_tokens += sequence.num_cached_tokens

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get `sequence` blocks for `num_tokens`, if need be from the last in the order.

        False if that is itself, or if it takes part in the next step only: blocks are coming from those that leave.
        """
        while not self.blocks.try_grow(sequence, num_tokens):
            if self.leaving:
                return False
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        victim.num_preemptions += 1
        self.counters.num_preemptions += 1
        if victim.num_launched_tokens:
            victim.status = SequenceStatus.LEAVING
            self.leaving.append(victim)
        else:
            self._let_wait(victim)

    def _let_wait(self, victim: Sequence) -> None:
        """Take the blocks of one that was preempted: it is computed again."""
        self.blocks.release(victim)
        victim.num_computed_tokens = 0
        victim.status = SequenceStatus.WAITING
        self.waiting.push(victim)
