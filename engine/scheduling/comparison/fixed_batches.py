"""Disciplines with fixed batches: `static` and `dynamic`."""

from collections.abc import Callable

from sluice.engine.batch import Batch, PaddingRow, ScheduledRow
from sluice.engine.config import EngineConfig
from sluice.engine.executor import ModelLimits
from sluice.engine.scheduling.comparison.mixed_steps import ComparisonScheduler


class FixedBatches(ComparisonScheduler):
    """A batch starts when no sequence runs, and none joins it; it is a rectangle until the slowest sequence has ended.

    It starts when it is full, or `window_s` after a plan first saw a waiting sequence.
    """

    def __init__(
        self, config: EngineConfig, limits: ModelLimits, clock: Callable[[], float], *, window_s: float
    ) -> None:
        super().__init__(config, limits, clock)
        self._window_s = window_s
        self._first_seen_s: float | None = None
        self._num_rows = 0

    def _plan(self) -> Batch:
        if not self.waiting:
            self._first_seen_s = None
        elif self._first_seen_s is None:
            self._first_seen_s = self._clock()
        running = self._schedule_running(self.running)
        if running or self.gathering_s > 0:
            return Batch(tuple(running), padding=self._padding(running))
        joined = self._schedule_waiting(self.max_tokens, _Rectangle(self.max_tokens).cut)
        self._num_rows, self._first_seen_s = len(joined), None
        return Batch(tuple(joined), num_joined=len(joined), padding=self._padding(joined))

    def _num_places(self, num_ending: int) -> int:
        """See `Scheduler._num_places`: a batch is gathered, and those that wait are part of it."""
        return 0 if self.running else max(0, self._config.max_num_seqs - self.num_waiting)

    @property
    def gathering_s(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride] - it changes with the time
        """What is left of the window, all of it if no sequence was waiting before. See `Scheduler.gathering_s`."""
        if self.running or not 0 < self.num_waiting < self._config.max_num_seqs:
            return 0.0
        now_s = self._clock()
        first_seen_s = now_s if self._first_seen_s is None else self._first_seen_s
        return max(0.0, first_seen_s + self._window_s - now_s)

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
