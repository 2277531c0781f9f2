"""Ways of batching, to be compared with each other: when those waiting may join, what they hold, how prompts are cut.

A discipline plans a step from the scheduler's verbs (`Step`): it is a few small choices and no loop of its own.

| name | who joins, and when | blocks held from the join on | prompts | padded |
|---|---|---|---|---|
| continuous | anyone, in any step | known tokens, then one at a time | cut by the budget, beside decodes | no |
| prefill-first | anyone, in any step | known tokens, then one at a time | whole; decodes stand still | no |
| slots | anyone, while a slot is free | the longest sequence of the model | cut by the budget, beside decodes | no |
| orca | anyone, in any step | prompt and its longest output | whole, beside decodes | no |
| dynamic | a full batch, or after a window | prompt and its longest output | whole, all at once | yes |
| static | a batch, when the one before has ended | prompt and its longest output | whole, all at once | yes |

`orca` is Yu et al., Orca, OSDI 2022; `slots` is how servers with one contiguous cache per request work; `prefill-first`
is vLLM before chunked prefill (Kwon et al., SOSP 2023); `dynamic` is what general model servers call dynamic batching;
`static` is a loop around a `generate` call. Where a discipline can be made better without changing what it is, it is:
tokens are handed out as they are computed, whoever ends early gives its blocks back, a static batch begins with whoever
waits instead of holding the last few for ever, and nobody computes padding beyond the rectangle of its own step.

The budget holds for all of them, padding included, as an executor's buffers are made for it. So a prompt is computed
whole where the budget holds it, and only a longer one is cut.

Nobody starves under any of them. Those that join are the first in the order, and those that run go on in every step,
but for the decodes of `prefill-first`: each prompt takes a place, and once no place or no block is left they go on.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from engine.batch import Batch, PaddingRow, ScheduledSequence
from engine.config import EngineConfig
from engine.executor import ModelLimits
from engine.sequence import Sequence

Cut = Callable[[int, int], int]
"""(tokens owed, tokens left of the step's budget) to the tokens computed now; 0: it waits for another step."""


class Step(Protocol):
    """What a step is planned from: the scheduler, see there."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def now_s(self) -> float: ...
    def run(self) -> list[ScheduledSequence]: ...
    def run_prompts(self) -> list[ScheduledSequence]: ...
    def join(
        self, scheduled: Iterable[ScheduledSequence], cut: Cut, *, holds_back: bool = True
    ) -> list[ScheduledSequence]: ...
    def chunk(self, num_owed: int, tokens_left: int) -> int: ...


class Discipline(Protocol):
    """One way of batching."""

    @property
    def may_grow(self) -> bool:
        """Whether a sequence may need blocks beyond those that it got when it joined."""
        ...

    @property
    def may_overlap(self) -> bool:
        """Whether a step may be planned while the one before is in flight.

        This is the one place that says what runs at lag 0 although the executor could run ahead: batches that are
        rectangles, whose width and padding depend on who has ended.
        """
        ...

    def plan(self, step: Step) -> Batch:
        """Choose who computes what in the next step; empty where nobody does. The only one that may change anything."""
        ...

    def num_held_tokens(self, sequence: Sequence) -> int:
        """Tokens whose blocks `sequence` gets when it joins: at least those it has, at most what the cache holds."""
        ...

    def num_places(self, step: Step) -> int:
        """Sequences that may still come so that they start in the next steps."""
        ...

    def gathering_s(self, step: Step) -> float:
        """Seconds for which a step computes nothing although sequences wait and none runs."""
        ...


class Continuous:
    """One token budget for all: decodes first, then as much of the prompts as is left of it."""

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
        """See `Discipline.num_places`. None while anyone waits: what is not here stays visible to other workers."""
        return 0 if step.num_waiting else self._config.max_num_seqs - step.num_running

    def gathering_s(self, step: Step) -> float:
        """See `Discipline.gathering_s`."""
        return 0.0

    def _whole(self, num_owed: int, tokens_left: int) -> int:
        """All of a prompt or nothing of it; one that no step's budget holds beside the decodes is cut."""
        if num_owed <= tokens_left:
            return num_owed
        is_too_long = num_owed > self._config.max_num_batched_tokens - self._config.max_num_seqs
        return tokens_left if is_too_long else 0

    def _num_longest_tokens(self, sequence: Sequence) -> int:
        """Tokens of which `sequence` can ever have keys and values: those of its last one are never computed."""
        num_longest = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        return max(len(sequence.token_ids), min(num_longest, self._limits.max_model_len) - 1)


class PrefillFirst(Continuous):
    """Two kinds of step: prompts as long as one may join, decodes otherwise."""

    def plan(self, step: Step) -> Batch:
        """See `Discipline.plan`."""
        prompts = step.run_prompts()
        joined = step.join(prompts, self._whole)
        scheduled = (*prompts, *joined) or step.run()
        return Batch(tuple(scheduled), num_joined=len(joined))


class Slots(Continuous):
    """The cache is cut into equal slots, each for the longest sequence that the model takes."""

    may_grow = False

    def num_held_tokens(self, sequence: Sequence) -> int:
        """See `Discipline.num_held_tokens`."""
        return min(self._limits.max_model_len, self._limits.num_blocks * self._limits.block_size)


class Orca(Continuous):
    """Anyone may join in any step who finds blocks for all that it may ever need."""

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
    """A batch begins when nobody runs, and nobody joins it; it is a rectangle until the slowest has ended.

    It begins when it is full, or `window_s` after a plan first saw one of those waiting.
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
        # Whoever were held back for a prefix would wait for the whole batch.
        joined = step.join((), _Rectangle(step.max_tokens).cut, holds_back=False)
        self._num_rows, self._first_seen_s = len(joined), None
        return Batch(tuple(joined), num_joined=len(joined), padding=self._padding(joined))

    def num_places(self, step: Step) -> int:
        """See `Discipline.num_places`."""
        return 0 if step.num_running else max(0, self._config.max_num_seqs - step.num_waiting)

    def gathering_s(self, step: Step) -> float:
        """See `Discipline.gathering_s`. Where nobody was seen waiting before, the window is whole."""
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

    def _padding(self, rows: list[ScheduledSequence]) -> tuple[PaddingRow, ...]:
        """What the rectangle of `rows` and of those that have ended has besides them."""
        if not rows:
            return ()
        width = max(row.num_tokens for row in rows)
        context_len = max(row.start + row.num_tokens for row in rows)
        short = [PaddingRow(width - row.num_tokens, context_len) for row in rows if row.num_tokens < width]
        return (*short, *(PaddingRow(width, context_len),) * (self._num_rows - len(rows)))


class _Rectangle:
    """Prompts of a batch, padded to the longest: as many as the budget holds. Changes with each that joins."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._width = 0
        self._num_rows = 0

    def cut(self, num_owed: int, tokens_left: int) -> int:
        """See `Cut`. What counts is the rectangle, not the tokens left."""
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
