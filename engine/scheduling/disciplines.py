"""Batching disciplines: when waiting sequences join, how many blocks they reserve, how prompts are split.

A discipline plans a step with the scheduler's operations (`Step`): it makes a few choices and has no loop.

| name | who joins, and when | blocks reserved at the join | prompts | padded |
|---|---|---|---|---|
| continuous | any sequence, in any step | known tokens, then one at a time | split by the budget, with decodes | no |
| prefill-first | any sequence, in any step | known tokens, then one at a time | whole; decodes pause | no |
| slots | any sequence, while a slot is free | the model's longest sequence | split by the budget, with decodes | no |
| orca | any sequence, in any step | prompt and its longest output | whole, with decodes | no |
| dynamic | a full batch, or after a window | prompt and its longest output | whole, all at once | yes |
| static | a batch, when the previous one has ended | prompt and its longest output | whole, all at once | yes |

`orca` is Yu et al., Orca, OSDI 2022. `slots` models servers with one contiguous cache per request. `prefill-first` is
vLLM before chunked prefill (Kwon et al., SOSP 2023). `dynamic` is the dynamic batching of general model servers.
`static` is a loop around a `generate` call. Each is implemented as well as its definition allows: tokens are returned
as they are computed, a sequence that ends early releases its blocks, a static batch starts with the sequences that are
waiting instead of holding the last few back, and no padding exceeds the rectangle of its step.

The token budget of a step holds for all disciplines, padding included, since an executor's buffers have that size. A
prompt is computed whole if the budget holds it; only a longer one is split.

No discipline starves a sequence. Sequences join in the policy's order, and running ones advance in every step. The
exception is `prefill-first`, whose decodes pause while prompts join; each prompt takes a slot, and decodes resume once
no slot or no block is left.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from sluice.engine.batch import Batch, PaddingRow, ScheduledRow
from sluice.engine.config import EngineConfig
from sluice.engine.executor import ModelLimits
from sluice.engine.sequence import Sequence

Cut = Callable[[int, int], int]
"""(tokens owed, tokens left of the step's budget) to the tokens computed now; 0: wait for another step."""


class Step(Protocol):
    """Scheduler operations that a discipline plans a step with; see `Scheduler`."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def now_s(self) -> float: ...
    def run(self) -> list[ScheduledRow]: ...
    def run_prompts(self) -> list[ScheduledRow]: ...
    def join(self, scheduled: Iterable[ScheduledRow], cut: Cut, *, holds_back: bool = True) -> list[ScheduledRow]: ...
    def chunk(self, num_owed: int, tokens_left: int) -> int: ...


class Discipline(Protocol):
    """One batching discipline."""

    @property
    def may_grow(self) -> bool:
        """Whether a sequence may need blocks beyond those it got when it joined."""
        ...

    @property
    def may_overlap(self) -> bool:
        """Whether a step may be planned while the previous one is in flight.

        False forces lag 0 even if the executor could run ahead: the width and padding of rectangular batches depend on
        which sequences have ended.
        """
        ...

    def plan(self, step: Step) -> Batch:
        """Plan the next step; empty if there is nothing to compute. The only method that may change state."""
        ...

    def num_held_tokens(self, sequence: Sequence) -> int:
        """Return the tokens to reserve blocks for at the join: at least the sequence's, at most the cache's."""
        ...

    def num_places(self, step: Step) -> int:
        """Return how many more sequences can start in the next steps."""
        ...

    def gathering_s(self, step: Step) -> float:
        """Return seconds for which a step computes nothing although sequences wait and none runs."""
        ...


class Continuous:
    """One token budget for all: decodes first, then as much of the prompts as fits."""

    may_grow = True
    may_overlap = True

    def __init__(self, config: EngineConfig, limits: ModelLimits) -> None:
        self._config = config
        self._limits = limits

    def plan(self, step: Step) -> Batch:
        """See `Discipline.plan`."""
        running = step.run()
        joined = step.join(running, step.chunk)
        return Batch((*running, *joined), num_joined=len(joined))

    def num_held_tokens(self, sequence: Sequence) -> int:
        """See `Discipline.num_held_tokens`."""
        return len(sequence.token_ids)

    def num_places(self, step: Step) -> int:
        """Return 0 while any sequence waits: jobs not taken stay visible to other workers.

        See `Discipline.num_places`.
        """
        return 0 if step.num_waiting else self._config.max_num_seqs - step.num_running

    def gathering_s(self, step: Step) -> float:
        """See `Discipline.gathering_s`."""
        return 0.0

    def _whole(self, num_owed: int, tokens_left: int) -> int:
        """Schedule a prompt whole or not at all; one that no step's budget holds alongside the decodes is split."""
        if num_owed <= tokens_left:
            return num_owed
        is_too_long = num_owed > self._config.max_num_batched_tokens - self._config.max_num_seqs
        return tokens_left if is_too_long else 0

    def _num_longest_tokens(self, sequence: Sequence) -> int:
        """Return the tokens of which `sequence` can ever have keys and values: all but its last one."""
        num_longest = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        return max(len(sequence.token_ids), min(num_longest, self._limits.max_model_len) - 1)


class PrefillFirst(Continuous):
    """Two kinds of step: prefill while a sequence can join, decode otherwise."""

    def plan(self, step: Step) -> Batch:
        """See `Discipline.plan`."""
        prompts = step.run_prompts()
        joined = step.join(prompts, self._whole)
        scheduled = (*prompts, *joined) or step.run()
        return Batch(tuple(scheduled), num_joined=len(joined))


class Slots(Continuous):
    """The cache is divided into equal slots, each as long as the model's longest sequence."""

    may_grow = False

    def num_held_tokens(self, sequence: Sequence) -> int:
        """See `Discipline.num_held_tokens`."""
        return min(self._limits.max_model_len, self._limits.num_blocks * self._limits.block_size)


class Orca(Continuous):
    """A sequence joins in any step that has blocks for its longest output."""

    may_grow = False

    def plan(self, step: Step) -> Batch:
        """See `Discipline.plan`."""
        running = step.run()
        joined = step.join(running, self._whole)
        return Batch((*running, *joined), num_joined=len(joined))

    def num_held_tokens(self, sequence: Sequence) -> int:
        """See `Discipline.num_held_tokens`."""
        return self._num_longest_tokens(sequence)


class FixedBatches(Orca):
    """A batch starts when no sequence runs, and none joins it; it is a rectangle until the slowest sequence has ended.

    It starts when it is full, or `window_s` after a plan first saw a waiting sequence.
    """

    may_overlap = False

    def __init__(self, config: EngineConfig, limits: ModelLimits, *, window_s: float) -> None:
        super().__init__(config, limits)
        self._window_s = window_s
        self._first_seen_s: float | None = None
        self._num_rows = 0

    def plan(self, step: Step) -> Batch:
        """See `Discipline.plan`."""
        self._note_who_waits(step)
        running = step.run()
        if running or self.gathering_s(step) > 0:
            return Batch(tuple(running), padding=self._padding(running))
        # A sequence held back for a prefix would wait for the whole batch.
        joined = step.join((), _Rectangle(step.max_tokens).cut, holds_back=False)
        self._num_rows, self._first_seen_s = len(joined), None
        return Batch(tuple(joined), num_joined=len(joined), padding=self._padding(joined))

    def num_places(self, step: Step) -> int:
        """See `Discipline.num_places`."""
        return 0 if step.num_running else max(0, self._config.max_num_seqs - step.num_waiting)

    def gathering_s(self, step: Step) -> float:
        """Return what is left of the window, all of it if no sequence was waiting before.

        See `Discipline.gathering_s`.
        """
        if step.num_running or not 0 < step.num_waiting < self._config.max_num_seqs:
            return 0.0
        now_s = step.now_s
        first_seen_s = now_s if self._first_seen_s is None else self._first_seen_s
        return max(0.0, first_seen_s + self._window_s - now_s)

    def _note_who_waits(self, step: Step) -> None:
        if step.num_waiting == 0:
            self._first_seen_s = None
        elif self._first_seen_s is None:
            self._first_seen_s = step.now_s

    def _padding(self, rows: list[ScheduledRow]) -> tuple[PaddingRow, ...]:
        """Return the padding that completes the rectangle of `rows` and of the sequences that have ended."""
        if not rows:
            return ()
        width = max(row.num_tokens for row in rows)
        context_len = max(row.start + row.num_tokens for row in rows)
        short = [PaddingRow(width - row.num_tokens, context_len) for row in rows if row.num_tokens < width]
        return (*short, *(PaddingRow(width, context_len),) * (self._num_rows - len(rows)))


class _Rectangle:
    """Prompts of a batch, padded to the longest: as many as the budget holds. Updated by each prompt that joins."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._width = 0
        self._num_rows = 0

    def cut(self, num_owed: int, tokens_left: int) -> int:
        """Limit the padded rectangle to the budget, instead of the tokens. See `Cut`."""
        width = max(self._width, num_owed)
        if self._num_rows and (self._num_rows + 1) * width > self._budget:
            return 0
        self._num_rows += 1
        self._width = width
        return min(num_owed, self._budget)


def make_discipline(config: EngineConfig, limits: ModelLimits) -> Discipline:
    """Build the discipline that `config` names."""
    if config.discipline == "static":
        return FixedBatches(config, limits, window_s=0.0)
    if config.discipline == "dynamic":
        return FixedBatches(config, limits, window_s=config.batch_window_s)
    kinds = {"continuous": Continuous, "prefill-first": PrefillFirst, "slots": Slots, "orca": Orca}
    return kinds[config.discipline](config, limits)
