"""A device that lags by one step, around any executor: a GPU that receives step k+1 before k is over."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from sluice.engine.batch import Batch, Masks, Sampled
from sluice.engine.executor import Executor, Launched, ModelLimits
from sluice.kernels.copy_blocks import parts_of

if TYPE_CHECKING:
    # Most of what lags computes with integers, and needs no torch.
    from sluice.engine.execution.model_runner import ModelRunner


class LaggingExecutor:
    """Computes a step only when the next one was launched, or when its rows are waited for; in the order of launches.

    Blocks that a step is the first to write are scribbled over as soon as it is launched, before the step in flight has
    run: one that was taken from a row in flight shows. A step is computed whether anybody collects it or not.
    """

    lag = 1

    def __init__(self, executor: Executor, *, scribble: Callable[[list[int]], None] = lambda block_ids: None) -> None:
        self._executor = executor
        self._scribble = scribble
        self._in_flight: deque[_LaggingStep] = deque()
        self._tables: dict[int, tuple[tuple[int, ...], ...]] = {}
        """Entries of the block tables by row slot, with the writes of all launched steps."""

        self.num_lagged = 0
        """Steps that were launched while another one was in flight."""

    @property
    def limits(self) -> ModelLimits:
        return self._executor.limits

    @property
    def fingerprint(self) -> str:
        return self._executor.fingerprint

    def launch(self, batch: Batch) -> Launched:
        for one in batch.admissions:
            self._tables[one.slot] = _entries(one.block_ids, one.window_ids)
        for slot, _, first, block_ids, window_ids in batch.table_writes:
            self._tables[slot] = (*self._tables[slot][:first], *_entries(block_ids, window_ids))
        self._scribble(self._fresh_blocks(batch))
        step = _LaggingStep(self, batch)
        self._in_flight.append(step)
        if len(self._in_flight) > 1:
            self.num_lagged += 1
            self.run_next()
        return step

    def run_next(self) -> None:
        """Let the device get on with the oldest step."""
        self._in_flight.popleft().run(self._executor)

    def _fresh_blocks(self, batch: Batch) -> list[int]:
        size = self.limits.block_size
        fresh = {copy.destination for copy in (*batch.copies, *batch.loads)}
        for row in batch.rows:
            table = self._tables[row.slot]
            end = row.start + row.num_tokens + len(batch.drafts.get(row.sequence_id, ()))
            fresh.update(*table[-(-row.start // size) : -(-end // size)])
        # What is saved is read when the device gets to this step.
        return sorted(fresh.difference(save.source for save in batch.saves))


def _entries(block_ids: tuple[int, ...], window_ids: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The blocks of each entry, in all tables."""
    return tuple(zip(block_ids, *window_ids, strict=True))


def on_late_device(runner: "ModelRunner") -> LaggingExecutor:
    """A model on a device that lags, and makes NaN of blocks that are used again too early."""
    caches = runner._caches  # pyright: ignore[reportPrivateUsage]

    def scribble(block_ids: list[int]) -> None:
        for cache in caches:
            for part in parts_of(cache):
                # Codes in 8 bits are no NaN, but their scales are.
                if part.is_floating_point():
                    part[block_ids] = float("nan")

    return LaggingExecutor(runner, scribble=scribble)


class _LaggingStep:
    """One step on its way. Changes when the device gets to it."""

    def __init__(self, device: LaggingExecutor, batch: Batch) -> None:
        self._device = device
        self._batch = batch
        self._launched: Launched | Exception | None = None

    def draw(self, masks: Masks) -> None:
        assert self._launched is None, "the step is drawn after it has run"
        self._batch = replace(self._batch, masks=masks, draws_later=False)

    def run(self, executor: Executor) -> None:
        assert not self._batch.draws_later, "the step runs before its masks are known"
        try:
            self._launched = executor.launch(self._batch)
        except Exception as error:  # noqa: BLE001 - it is raised when the step is collected
            self._launched = error

    def collect(self) -> list[Sampled]:
        while self._launched is None:
            self._device.run_next()
        if isinstance(self._launched, Exception):
            raise self._launched
        return self._launched.collect()
