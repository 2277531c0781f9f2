"""The life of sequences in the engine: they wait, run, are preempted, and end. Knows no tensors, text or queues.

A scheduler plans steps (`schedule`), and is told their outcome: `commit` for those that succeeded, `finish` for
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
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain

from sluice.engine.batch import Batch, Sampled, ScheduledRow
from sluice.engine.config import EngineConfig
from sluice.engine.executor import ModelLimits
from sluice.engine.request import NO_ROOM, Room
from sluice.engine.scheduling.adapter_places import AdapterPlaces
from sluice.engine.scheduling.admission import AdmissionMode, make_admission
from sluice.engine.scheduling.blocks.manager import BlockManager, CachedPrefix
from sluice.engine.scheduling.blocks.windows import WindowSizes
from sluice.engine.scheduling.lookahead import Lookahead
from sluice.engine.scheduling.policies import make_policy
from sluice.engine.scheduling.room import RoomEstimate
from sluice.engine.scheduling.row_slots import RowSlots
from sluice.engine.scheduling.step_budget import StepBudget
from sluice.engine.scheduling.step_copies import StepCopies
from sluice.engine.scheduling.timing.measured_steps import MeasuredSteps
from sluice.engine.scheduling.waiting_queue import WaitingQueue
from sluice.engine.sequence import Sequence, SequenceStatus, advance, land, launch


@dataclass(slots=True, eq=False)
class SchedulerCounters:
    """Counts since the engine was created. Mutable."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of the sequences that were scheduled."""

    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""

    num_loaded_tokens: int = 0
    """Tokens, prompt or output, found in the host tier of the prefix cache."""

    num_drafted_tokens: int = 0
    """Drafts of steps that have succeeded."""

    num_accepted_tokens: int = 0
    """Of these, the ones that were right."""


class Scheduler(ABC):
    """Running and waiting sequences. Mutable."""

    overlaps = False
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
        self._adapters = AdapterPlaces(limits.max_adapters)
        self.blocks = BlockManager(
            limits.num_blocks,
            limits.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            window=WindowSizes(limits.sliding_window, config.max_num_batched_tokens, limits.window_groups)
            if limits.sliding_window
            else None,
            num_host_blocks=limits.num_host_blocks,
        )
        self.running: list[Sequence] = []
        """In the policy's order; for first come, first served this is the order of admission."""

        self.leaving: list[Sequence] = []
        """Preempted or finished sequences with a row in a step in flight: they release their blocks when it lands."""

        self.waiting = WaitingQueue(self._policy)
        self._preempted: dict[int, Sequence] = {}
        """Those of the waiting sequences that were preempted, by id."""

        self._latest_joined = -1
        """The highest id of those that have run: ids ascend as sequences are made."""

        self.num_changes = 0
        """How often sequences have begun or ceased to run."""

        self.steps = MeasuredSteps()
        self._admission = self._make_admission()
        self._room = RoomEstimate(config, limits, self.blocks, self._admission)
        self._ahead = Lookahead()
        self._copies = StepCopies(self.blocks, self._slots)
        self.counters = SchedulerCounters()

    # ------------------------------------------------------------ what the engine calls

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.push(sequence)

    def schedule(self) -> Batch:
        """Plan one step. No token counts as computed before `commit`, so a failed step has changed nothing."""
        return self._slots.with_writes(self._copies.add_to(self._plan()))

    def launch(self, batch: Batch) -> None:
        """Record that a step is in flight while the next one is planned."""
        launch(self._slots.of(batch), batch)

    def land(self, batch: Batch) -> None:
        """Record that a step in flight has completed: successes are committed, the rest is planned again.

        Sequences that left meanwhile, and are in no other step in flight, release their blocks.
        """
        land(self._slots.of(batch), batch)
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
        """Advance the sequences of a successful step by the tokens that it computed and sampled."""
        self._budget.note_success()
        self._slots.confirm(batch)
        self._copies.confirm(batch)
        for sequence in advance(self._slots.of(batch), batch, sampled, self.blocks.block_size):
            self.blocks.publish(sequence)
        if batch.drafts:
            self.counters.num_drafted_tokens += batch.num_drafts
            self.counters.num_accepted_tokens += sum(len(row.token_ids) - 1 for row in sampled if row.token_ids)

    def extend(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """Let tokens follow those of `sequence` that no step has sampled; the next ones compute them."""
        sequence.extend(token_ids)
        self._slots.note_tokens(sequence)

    def note_time(self, batch: Batch, taken_s: float) -> None:
        """Note how long a step took that has succeeded as it was launched."""
        self.steps.note(batch, taken_s)
        self._ahead.note_step(taken_s)

    def look_ahead(self, seconds: float) -> None:
        """Set for how long ahead `room` counts the places of sequences that end for certain."""
        self._ahead.seconds = seconds

    def finish(self, sequences: Items[Sequence], *, suspects: Iterable[Sequence] = ()) -> None:
        """Release `sequences`, running or waiting.

        Args:
            sequences: each is known and not finished.
            suspects: those whose keys and values may be wrong (NaN): their blocks are removed from the prefix index.
        """
        for sequence in suspects:
            self.blocks.retract(sequence)
        self.num_changes += 1
        num_waited = 0
        for sequence in sequences:
            if sequence.status is SequenceStatus.WAITING:
                num_waited += 1
                self._preempted.pop(sequence.id, None)
            elif not sequence.num_launched_tokens:
                self._release(sequence)
            elif sequence.status is SequenceStatus.RUNNING:
                self.leaving.append(sequence)
            sequence.finish()
        self.running[:] = [sequence for sequence in self.running if sequence.status is SequenceStatus.RUNNING]
        if num_waited:
            self.waiting.note_ended(num_waited)

    def shrink(self, batch: Batch) -> None:
        """Plan smaller steps for a while: the device lacked memory for `batch`, of which nothing was computed.

        Sequences at the end of the order that no longer fit are preempted.
        """
        self._budget.shrink(batch.num_tokens)
        self.blocks.host.give_up_saves()
        while len(self.running) > self._budget.tokens:
            self._preempt(self.running.pop())

    def rest_from_drafts(self) -> None:  # noqa: B027 - most schedulers plan none at all
        """Plan no drafts for a while, after a step failed with drafts and succeeded without."""

    def room(self) -> Room:
        """Return what can start after the next steps; while a sequence waits for more, only `Room.over_class`.

        What these steps end for certain counts as free: what is pulled while they run has its place when they are over.
        """
        num_steps = self._ahead.num_steps
        ending = [sequence for sequence in self.running if sequence.ends_within(num_steps)]
        num_places = self._num_places(len(ending))
        if num_places <= 0:
            return NO_ROOM
        return self._room.free(self.running, ending, self.waiting.in_order(), num_places)

    def stalled_requests(self, for_s: float) -> list[str]:
        """Return the requests of which a sequence was preempted `for_s` seconds ago or earlier, and none runs."""
        if not self._preempted:
            return []
        latest_s = self._clock() - for_s
        preempted = sorted(self._preempted.values(), key=self._policy.order)
        stalled = dict.fromkeys(
            sequence.request_id for sequence in preempted if (sequence.preemptions.since_s or 0.0) <= latest_s
        )
        active = {sequence.request_id for sequence in chain(self.running, self.leaving)}
        return [request_id for request_id in stalled if request_id not in active]

    def _num_places(self, num_ending: int) -> int:
        """Return how many more sequences can start once `num_ending` of the running ones have ended.

        At most 0 if fewer places come than sequences wait, or one of these was preempted or overtaken: jobs not taken
        stay visible to other workers, and a stream of newcomers would take each place that comes. One that waits for
        the place of an adapter counts as one that waits for such a place.
        """
        num_free, num_waiting = self._config.max_num_seqs - len(self.running), self.num_waiting
        if num_waiting and (num_free > 0 or self._preempted or num_waiting > len(self.waiting)):
            return 0
        num_left = num_free + num_ending - num_waiting
        # Looked for last: then fewer wait than there are places.
        return 0 if num_left > 0 and self._is_overtaken else num_left

    @property
    def _is_overtaken(self) -> bool:
        """Whether one joined that was made later than one that waits."""
        return any(sequence.id < self._latest_joined for sequence in self.waiting.in_order())

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks, or about to be."""
        num_waiting = len(self.waiting)
        if self.leaving:
            num_waiting += sum(sequence.status is SequenceStatus.LEAVING for sequence in self.leaving)
        return num_waiting

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
        self._adapters.check_invariants([*self.running, *self.leaving])
        orders = [self._policy.order(sequence) for sequence in self.running]
        assert orders == sorted(set(orders)), "the running sequences are out of order"
        assert len(self.running) <= self._config.max_num_seqs, "more sequences run than max_num_seqs"
        assert len(self.running) <= self.max_tokens, "more sequences run than a step has tokens for"
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.num_slots == sequence.num_entries * self.blocks.block_size
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens
            assert sequence.num_computed_tokens + sequence.num_launched_tokens <= sequence.num_slots
            assert sequence.num_uncomputed_tokens > 0, "a running sequence owes no tokens"
            assert sequence.num_launched_tokens or not sequence.num_launched_drafts, "drafts are in no step in flight"
        for sequence in self.leaving:
            assert sequence.status in (SequenceStatus.LEAVING, SequenceStatus.FINISHED)
            assert sequence.num_launched_tokens, "a leaving sequence is in no step in flight"
        waiting = self.waiting.in_order()
        preempted = {sequence.id: sequence for sequence in waiting if sequence.preemptions.since_s is not None}
        assert preempted == self._preempted, "preempted sequences are not those that wait"
        for sequence in self.waiting.in_order():
            assert sequence.status is SequenceStatus.WAITING
            assert not any(sequence.tables), "a waiting sequence holds blocks"
            assert not sequence.has_pending_copies, "a waiting sequence holds the source of a copy"
            assert sequence.num_computed_tokens == 0

    # ------------------------------------------------------------ what a scheduler decides

    @abstractmethod
    def _plan(self) -> Batch:
        """Plan the next step; empty if there is nothing to compute."""

    def _make_admission(self) -> AdmissionMode:
        """Make the admission mode."""
        return make_admission(self._config.admission, self._limits)

    def _chunk(self, start: int, num_owed: int, tokens_left: int) -> int:
        """Return how many of its owed tokens, from `start` on, a sequence computes now.

        `tokens_left` are left of the step's budget.
        """
        return min(num_owed, tokens_left)

    def _schedule_running(self, sequences: Iterable[Sequence]) -> list[ScheduledRow]:
        """Schedule running sequences, read from `self.running` one by one; one that lacks a block takes it from others.

        A victim is always the last in the order: it leaves the end that is not read yet.
        """
        rows: list[ScheduledRow] = []
        tokens_left = self.max_tokens
        for sequence in sequences:
            row = sequence.owed()
            if row is not None and row.num_tokens > 1:
                num_behind = len(self.running) - len(rows) - 1
                # A sequence that decodes computes a token in each step, however many it was forced to add.
                least = int(row.start >= sequence.num_prompt_tokens)
                row = row.first(max(least, self._chunk(row.start, row.num_tokens, tokens_left - num_behind)))
            if row is None:
                continue
            end = row.start + row.num_tokens
            if end <= sequence.num_slots or self._grow(sequence, end):
                rows.append(row)
                tokens_left -= row.num_tokens
        return rows

    # ------------------------------------------------------------ transitions

    def _try_join(self, sequence: Sequence, prefix: CachedPrefix, num_tokens: int) -> ScheduledRow | None:
        """Let the head of the queue run, and compute `num_tokens`; None if there are not enough blocks for it.

        Args:
            sequence: popped from the queue by the caller if it joins.
            prefix: its cached blocks, by `self.blocks`.
            num_tokens: 1 or more.
        """
        if not self._adapters.has_room(sequence):
            return None
        num_held = self._admission.num_held_tokens(sequence)
        num_spare = self._admission.num_spare_blocks(self.running)
        if not self.blocks.try_hold(sequence, prefix, num_spare=num_spare, num_held=num_held):
            return None
        order = self._policy.order
        # Most join at the end.
        if not self.running or order(self.running[-1]) < order(sequence):
            self.running.append(sequence)
        else:
            insort(self.running, sequence, key=order)
        self.num_changes += 1
        sequence.join(self._slots.assign(sequence), prefix.num_tokens, self._clock())
        self._latest_joined = max(self._latest_joined, sequence.id)
        self._adapters.hold(sequence)
        self.counters.num_loaded_tokens += len(prefix.host_ids) * self.blocks.block_size
        if sequence.num_preemptions:
            del self._preempted[sequence.id]
        else:
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
            self.counters.num_cached_tokens += sequence.num_cached_tokens
        num_owed = len(sequence.token_ids) - prefix.num_tokens
        return ScheduledRow(sequence.slot, sequence.id, prefix.num_tokens, num_tokens, num_tokens == num_owed)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get `sequence` blocks for `num_tokens`, preempting from the end of the order if necessary.

        False if `sequence` itself was preempted, or if it must skip this step because leaving sequences will release
        blocks, or because it will itself, with a sliding window, when its step in flight lands.
        """
        while not self.blocks.try_grow(sequence, num_tokens):
            if self.leaving or (self._limits.sliding_window and sequence.num_launched_tokens):
                return False
            victim = self.running.pop()
            self._preempt(victim, sequence)
            if victim is sequence:
                return False
        self._slots.note_growth(sequence)
        return True

    def _preempt(self, victim: Sequence, heir: Sequence | None = None) -> None:
        """Take the blocks of `victim`, which the caller has removed from the running ones; `heir` needs them."""
        self.num_changes += 1
        victim.preempt(self._clock(), is_yield=heir is not None and heir.priority > victim.priority)
        self.counters.num_preemptions += 1
        if victim.num_launched_tokens:
            self.leaving.append(victim)
        else:
            self._let_wait(victim)

    def _let_wait(self, victim: Sequence) -> None:
        """Release the blocks of a preempted sequence and queue it for recomputation."""
        self._release(victim, comes_back=True)
        victim.wait()
        self._preempted[victim.id] = victim
        self.waiting.push(victim)

    def _release(self, sequence: Sequence, *, comes_back: bool = False) -> None:
        self.blocks.release(sequence, comes_back=comes_back)
        self._slots.release(sequence)
        self._adapters.release(sequence)
