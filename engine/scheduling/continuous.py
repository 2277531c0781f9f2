"""Continuous batching: the scheduler of a worker. Read `ContinuousScheduler._plan_known` first.

There is no prefill and no decode phase: a sequence is owed the tokens that it has not computed yet, one or thousands.
Each step has one budget of tokens for all. Running sequences are scheduled first, in the policy's order, then waiting
ones (iteration-level scheduling: Yu et al., Orca, OSDI 2022). A prompt longer than what is left of the budget is split
into chunks, and a chunk leaves one token for each running sequence after it, so that a prompt never stalls generation
(chunked prefill: Agrawal et al., Sarathi-Serve, OSDI 2024). With targets, a chunk is also limited by the time that the
step takes (`sluice.engine.scheduling.timing`). A sequence joins only when the blocks of its whole prompt are available,
and gets them all at once (or more: `scheduling.admission`). A sequence that cannot get a further block takes one from
the last running sequence in the order, which is recomputed later (preemption by recomputation: Kwon et al., vLLM, SOSP
2023).

No sequence starves. The first in the order can take blocks from all others and fits the cache alone, so it computes at
least one token in every step and ends after at most ceil(tokens / chunk) + max_tokens steps, where a budget of time
leaves a chunk of at least `LEAST_CHUNK`. Then the next one is first. While a step is in flight, a sequence that needs a
block which one in flight still has misses one step, so the first in the order computes a token in at least every second
step.

Hot module, as `sluice.engine.scheduling.scheduler`.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from sluice.engine.batch import Batch, ScheduledRow
from sluice.engine.config import EngineConfig
from sluice.engine.executor import ModelLimits
from sluice.engine.scheduling.drafting import Drafting
from sluice.engine.scheduling.prefix_sharing import PrefixSharing
from sluice.engine.scheduling.timing.time_budget import TimeBudget
from sluice.engine.scheduling.yielding import YieldingScheduler
from sluice.engine.sequence import Sequence
from sluice.engine.speculation.source import DraftSource


class ContinuousScheduler(YieldingScheduler):
    """Running sequences, then waiting ones, until the budget is used."""

    def __init__(
        self,
        config: EngineConfig,
        limits: ModelLimits,
        clock: Callable[[], float],
        draft_source: DraftSource | None = None,
        *,
        lag: int = 0,
    ) -> None:
        super().__init__(config, limits, clock)
        self.overlaps = lag > 0
        self._drafting: Drafting | None = None
        if draft_source is not None:
            self._drafting = Drafting(draft_source, limits, self.blocks, self._slots, clock, overlaps=self.overlaps)
        self._time_budget = TimeBudget(config.step_targets, self.steps)

    def finish(self, sequences: Items[Sequence], *, suspects: Iterable[Sequence] = ()) -> None:
        """See `Scheduler.finish`."""
        super().finish(sequences, suspects=suspects)
        if self._drafting is not None:
            self._drafting.end(sequences)

    def rest_from_drafts(self) -> None:
        """See `Scheduler.rest_from_drafts`."""
        if self._drafting is not None:
            self._drafting.rest()

    def _plan(self) -> Batch:
        batch = self._plan_known()
        if self._drafting is None:
            return batch
        return self._drafting.extend(
            batch,
            tokens_left=self.max_tokens - batch.num_tokens,
            running=self.running,
            num_drafted=self.counters.num_drafted_tokens,
            num_accepted=self.counters.num_accepted_tokens,
        )

    def _plan_known(self) -> Batch:
        """Plan a step without drafts."""
        self._time_budget.begin()
        num_preemptions = self.counters.num_preemptions
        self._join_higher()
        running = self._schedule_running(self.running)
        # Blocks that were taken from one sequence are not for a newcomer.
        if not self.waiting or self.counters.num_preemptions > num_preemptions:
            return Batch(tuple(running))
        joined = self._schedule_waiting(running)
        return Batch((*running, *joined), num_joined=len(joined))

    def _schedule_waiting(self, running: list[ScheduledRow]) -> list[ScheduledRow]:
        joined: list[ScheduledRow] = []
        tokens_left = self.max_tokens - sum(row.num_tokens for row in running)
        # Every running sequence must find a token in each step's budget, even if this step has none for it.
        most = min(self._config.max_num_seqs, self.max_tokens)
        sharing = PrefixSharing(self.blocks.block_size, self._computing_prompts(running))
        while self.waiting and tokens_left > 0 and len(self.running) < most and sharing.may_overtake:
            if self.blocks.num_free_blocks <= self._admission.num_spare_blocks(self.running):
                break  # whatever is cached of it, the next one needs a block of its own
            sequence = self.waiting.head
            prefix = self.blocks.lookup(sequence)
            if sharing.is_better_held_back(sequence, prefix):
                sharing.hold_back(self.waiting.pop())
                continue
            num_tokens = self._chunk(prefix.num_tokens, sequence.num_tokens - prefix.num_tokens, tokens_left)
            row = self._try_join(sequence, prefix, num_tokens) if num_tokens else None
            if row is None:
                break  # keep the order: no sequence overtakes one that only lacks room or time
            self.waiting.pop()
            sharing.note_joined(sequence)
            joined.append(row)
            tokens_left -= num_tokens
        for sequence in sharing.held_back:
            self.waiting.push(sequence)
        return joined

    def _chunk(self, start: int, num_owed: int, tokens_left: int) -> int:
        """See `Scheduler._chunk`."""
        threshold = self._config.long_prefill_token_threshold
        if threshold and len(self.running) + len(self.waiting) > 1:
            tokens_left = min(tokens_left, threshold)
        return self._time_budget.take(start, min(num_owed, tokens_left), self.running)

    def _computing_prompts(self, running: list[ScheduledRow]) -> list[Sequence]:
        """Return the sequences of which this step, or one in flight, computes more than a token."""
        computing = [self._slots[row] for row in running if row.num_tokens > 1]
        return computing + [sequence for sequence in self.running if sequence.num_launched_tokens > 1]
