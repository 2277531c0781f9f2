"""Disciplines whose sequences join in any step: `prefill-first`, `slots` and `orca`."""

from collections.abc import Callable, Iterable

from sluice.engine.batch import Batch, ScheduledRow
from sluice.engine.executor import ModelLimits
from sluice.engine.scheduling.admission import AdmissionMode, Guaranteed, Watermark
from sluice.engine.scheduling.scheduler import Scheduler
from sluice.engine.sequence import Sequence, SequenceStatus

Cut = Callable[[int, int], int]
"""(tokens owed, tokens left of the step's budget) to the tokens computed now; 0: wait for another step."""


class ComparisonScheduler(Scheduler):
    """What the disciplines share: a pass over running sequences, and one over waiting ones."""

    def _make_admission(self) -> AdmissionMode:
        return Watermark(self._limits)

    def _schedule_running(self, sequences: Iterable[Sequence]) -> list[ScheduledRow]:
        """Schedule running sequences; one that lacks a block takes it from the last in the order."""
        rows: list[ScheduledRow] = []
        tokens_left, num_behind = self.max_tokens, len(self.running)
        for sequence in sequences:
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # a victim of this step
            num_behind -= 1
            start = sequence.num_computed_tokens
            num_owed = len(sequence.token_ids) - start
            num_tokens = min(num_owed, tokens_left - num_behind) if num_owed > 1 else 1
            if start + num_tokens > sequence.num_slots and not self._grow(sequence, start + num_tokens):
                continue
            rows.append(ScheduledRow(sequence.slot, sequence.id, start, num_tokens, num_tokens == num_owed))
            tokens_left -= num_tokens
        return rows

    def _schedule_waiting(self, tokens_left: int, cut: Cut) -> list[ScheduledRow]:
        """Let waiting sequences join in their order, as long as `cut` and the blocks admit them."""
        rows: list[ScheduledRow] = []
        most = min(self._config.max_num_seqs, self.max_tokens)
        while self.waiting and tokens_left > 0 and len(self.running) < most:
            sequence = self.waiting.head
            prefix = self.blocks.lookup(sequence)
            num_owed = sequence.num_tokens - prefix.num_tokens
            # If no sequence runs, waiting does not free more budget.
            num_tokens = cut(num_owed, tokens_left) or (0 if self.running else min(num_owed, tokens_left))
            row = self._try_join(sequence, prefix, num_tokens) if num_tokens else None
            if row is None:
                break
            self.waiting.pop()
            rows.append(row)
            tokens_left -= num_tokens
        return rows

    def _whole(self, num_owed: int, tokens_left: int) -> int:
        """Schedule a prompt whole or not at all; one that no step's budget holds alongside the decodes is split."""
        if num_owed <= tokens_left:
            return num_owed
        is_too_long = num_owed > self._config.max_num_batched_tokens - self._config.max_num_seqs
        return tokens_left if is_too_long else 0


class PrefillFirst(ComparisonScheduler):
    """Two kinds of step: prefill while a sequence can join, decode otherwise."""

    def _plan(self) -> Batch:
        prompts = self._schedule_running([sequence for sequence in self.running if sequence.num_uncomputed_tokens > 1])
        joined = self._schedule_waiting(_tokens_left(self.max_tokens, prompts), self._whole)
        scheduled = (*prompts, *joined) or self._schedule_running(self.running)
        return Batch(tuple(scheduled), num_joined=len(joined))


class Slots(ComparisonScheduler):
    """The cache is divided into equal slots, each as long as the model's longest sequence."""

    def _plan(self) -> Batch:
        running = self._schedule_running(self.running)
        joined = self._schedule_waiting(_tokens_left(self.max_tokens, running), min)
        return Batch((*running, *joined), num_joined=len(joined))

    def _make_admission(self) -> AdmissionMode:
        return _EqualSlots(self._limits, self._config.max_num_batched_tokens)


class Orca(ComparisonScheduler):
    """A sequence joins in any step that has blocks for its longest output."""

    def _plan(self) -> Batch:
        running = self._schedule_running(self.running)
        joined = self._schedule_waiting(_tokens_left(self.max_tokens, running), self._whole)
        return Batch((*running, *joined), num_joined=len(joined))

    def _make_admission(self) -> AdmissionMode:
        return Guaranteed(self._limits)


class _EqualSlots:
    """Reserve the model's longest sequence."""

    def __init__(self, limits: ModelLimits, step_tokens: int) -> None:
        self._num_tokens = min(limits.max_model_len, limits.longest_sequence(limits.num_blocks, step_tokens))

    def num_held_tokens(self, sequence: Sequence) -> int:
        """See `AdmissionMode`."""
        return self._num_tokens

    def num_spare_blocks(self, running: list[Sequence]) -> int:
        """See `AdmissionMode`."""
        return 0


def _tokens_left(budget: int, rows: list[ScheduledRow]) -> int:
    return budget - sum(row.num_tokens for row in rows)
