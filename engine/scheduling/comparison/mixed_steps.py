"""Disciplines whose sequences join in any step: `prefill-first`, `slots` and `orca`."""

from collections.abc import Callable

from sluice.engine.batch import Batch, ScheduledRow
from sluice.engine.executor import ModelLimits
from sluice.engine.scheduling.admission import AdmissionMode, Watermark
from sluice.engine.scheduling.scheduler import Scheduler
from sluice.engine.sequence import Sequence

Cut = Callable[[int, int], int]
"""(tokens owed, tokens left of the step's budget) to the tokens computed now; 0: wait for another step."""


class ComparisonScheduler(Scheduler):
    """What the disciplines share: whole outputs are reserved, and waiting sequences join as each discipline says."""

    def _make_admission(self) -> AdmissionMode:
        return AdmissionMode(self._limits)

    def _plan_mixed(self, cut: Cut) -> Batch:
        """Plan a step of running sequences, then waiting ones."""
        running = self._schedule_running(self.running)
        joined = self._schedule_waiting(_tokens_left(self.max_tokens, running), cut)
        return Batch((*running, *joined), num_joined=len(joined))

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

    def _make_admission(self) -> AdmissionMode:
        return Watermark(self._limits)

    def _plan(self) -> Batch:
        prompts = self._schedule_running(sequence for sequence in self.running if sequence.num_uncomputed_tokens > 1)
        joined = self._schedule_waiting(_tokens_left(self.max_tokens, prompts), self._whole)
        scheduled = (*prompts, *joined) or self._schedule_running(self.running)
        return Batch(tuple(scheduled), num_joined=len(joined))


class EqualSlots(ComparisonScheduler):
    """The cache is divided into equal slots, each as long as the model's longest sequence."""

    def _make_admission(self) -> AdmissionMode:
        return _SlotReservation(self._limits, self._config.max_num_batched_tokens)

    def _plan(self) -> Batch:
        return self._plan_mixed(min)


class Orca(ComparisonScheduler):
    """A sequence joins in any step that has blocks for its longest output."""

    def _plan(self) -> Batch:
        return self._plan_mixed(self._whole)


class _SlotReservation(AdmissionMode):
    """Reserve the model's longest sequence."""

    def __init__(self, limits: ModelLimits, step_tokens: int) -> None:
        super().__init__(limits)
        self._num_tokens = min(limits.max_model_len, limits.longest_sequence(limits.num_blocks, step_tokens))

    def num_held_tokens(self, sequence: Sequence) -> int:
        """See `AdmissionMode.num_held_tokens`."""
        return self._num_tokens


def _tokens_left(budget: int, rows: list[ScheduledRow]) -> int:
    return budget - sum(row.num_tokens for row in rows)
