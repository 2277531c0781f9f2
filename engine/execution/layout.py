"""Lay a step out as the tensors that the decoder reads. Knows no model.

Hot: a few passes of Python over the sequences, no tensor per sequence; the rest is arithmetic over the whole batch.

Padding follows the sequences as rows like theirs: it attends to as many tokens as a padded row would, and writes to the
block after the cache's last, which no sequence uses.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice.engine.batch import Batch, Drafts, ScheduledRow
from sluice.engine.execution.kept_rows import kept_rows
from sluice.engine.execution.slots import Slot, Slots
from sluice.engine.execution.transfers import Staging, to_device
from sluice.kernels.adapters import NO_PLACE, RowPlaces
from sluice.kernels.decoder_step import StepAdapters, StepInputs
from sluice.kernels.prepare_batch import PADDING, PreparedTokens, StepPlan, prepare_batch

ALIGNED_COLUMNS = 4
"""Columns of tables of window groups are a multiple of this, so that each table begins at 16 bytes: Triton compiles a
separate kernel for unaligned pointers.
"""


class HostPlan(NamedTuple):
    """A step of S sequences, padding included, as the host sends it to the device: all int32."""

    token_ids: NDArray[np.int32]
    """`[T]`, as in `StepPlan`."""

    query_start_locs: NDArray[np.int32]
    """`[S + 1]`."""

    context_lens: NDArray[np.int32]
    """`[S]`."""

    logit_rows: NDArray[np.int32]
    """`[R]`: the tokens whose logits or hidden states are wanted."""

    tables: NDArray[np.int32]
    """`[S, columns]`: block ids."""

    window_tables: NDArray[np.int32]
    """`[W, S, columns]`."""

    max_query_len: int
    max_context_len: int

    @property
    def arrays(self) -> list[NDArray[np.int32]]:
        """What is sent: `window_tables` only if there are any."""
        parts = [self.token_ids, self.query_start_locs, self.context_lens, self.logit_rows, self.tables]
        return [*parts, self.window_tables] if len(self.window_tables) else parts


class _Decodes:
    """Tensors of a step of S decodes on the CPU, overwritten by the next such step."""

    def __init__(self, tables: NDArray[np.int32], window_tables: NDArray[np.int32]) -> None:
        num_sequences, num_windowed = len(tables), len(window_tables)
        self.input_ids = np.empty(num_sequences, dtype=np.int64)
        self.positions = np.empty(num_sequences, dtype=np.int64)
        self.slots = np.empty(num_sequences, dtype=np.int64)
        self.window_slots = np.empty((num_windowed, num_sequences), dtype=np.int64)
        self.context_lens = np.empty(num_sequences, dtype=np.int32)
        self._inputs = StepInputs(
            input_ids=torch.from_numpy(self.input_ids),
            positions=torch.from_numpy(self.positions),
            slot_mapping=torch.from_numpy(self.slots),
            block_tables=torch.from_numpy(tables),
            query_start_locs=torch.arange(num_sequences + 1, dtype=torch.int32),
            context_lens=torch.from_numpy(self.context_lens),
            logit_rows=torch.arange(num_sequences),
            window_slots=torch.from_numpy(self.window_slots) if num_windowed else None,
            window_tables=torch.from_numpy(window_tables) if num_windowed else None,
            max_query_len=1,
            max_context_len=0,
        )

    def inputs(self, max_context_len: int) -> StepInputs:
        """Return the tensors, which have their current contents."""
        return self._inputs._replace(max_context_len=max_context_len)


class BatchLayout:
    """The layout of steps. It keeps the block tables of the last step, since most rows stay the same."""

    def __init__(
        self, slots: Slots, *, max_num_seqs: int, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._slots = slots
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._device = device
        self._staging = Staging(device)
        self._tables = np.zeros((max_num_seqs, slots.tables.shape[1]), dtype=np.int32)
        self._window_tables = np.zeros((len(slots.window_tables), *self._tables.shape), dtype=np.int32)
        self._rows: list[tuple[Slot | None, int]] = [(None, 0)] * max_num_seqs
        """Of each row of `_tables`: whose blocks, and how many."""

        self._padding_tables = self._tables[:0]
        """Tables for the largest number of padding rows so far; None until padding is first needed."""

        self._decodes = _Decodes(self._tables[:0], self._window_tables[:, :0])

    def lay_out(
        self, batch: Batch, drawn_rows: Mapping[int, int] | None = None, drawn_ids: Tensor | None = None
    ) -> StepInputs:
        """Return the tensors of `batch`, valid until the next call.

        Args:
            batch: the step.
            drawn_rows: by sequence id, the rows that sampled tokens in the previous step.
            drawn_ids: `[R]` int64, the tokens that they sampled, on the device.

        Raises:
            KeyError: a token is known neither to the host nor to the previous step.
        """
        rows = batch.rows
        slots = [self._slots[row] for row in rows]
        is_known = self._device.type == "cpu" and not (batch.padding or drawn_rows or batch.drafts or batch.reads)
        if is_known and _are_decodes(rows, slots):
            return self._with_adapters(self._lay_out_decodes(rows, slots), slots)
        plan = self.plan(batch, drawn_rows)
        step, logit_rows = self._to_device(plan)
        spare_slot = self._num_blocks * self._block_size
        tokens = prepare_batch(step, drawn_ids, block_size=self._block_size, spare_slot=spare_slot)
        tensors = tensors_of(step, tokens, logit_rows, plan.max_query_len, plan.max_context_len)
        return self._with_adapters(tensors, slots, plan)

    def _with_adapters(self, tensors: StepInputs, slots: list[Slot], plan: HostPlan | None = None) -> StepInputs:
        """Add the places of the tokens' adapters, if any has one; without a plan, each sequence has one token."""
        used = tuple(sorted({slot.adapter_place for slot in slots if slot.adapter_place >= 0}))
        if not used:
            return tensors
        places = np.array([slot.adapter_place for slot in slots], dtype=np.int32)
        of_tokens, kept = places, places
        if plan is not None:
            num_padding = len(plan.context_lens) - len(slots)
            places = np.concatenate((places, np.full(num_padding, NO_PLACE, dtype=np.int32)))
            of_tokens = np.repeat(places, np.diff(plan.query_start_locs))
            kept = of_tokens[plan.logit_rows]
        rows = [RowPlaces(to_device(array, self._device), used) for array in (of_tokens, kept)]
        return tensors._replace(adapters=StepAdapters(*rows))

    def plan(
        self, batch: Batch, drawn_rows: Mapping[int, int] | None = None, *, num_columns: int | None = None
    ) -> HostPlan:
        """Return the arrays that the host sends for `batch`, valid until the next call.

        Args:
            batch: the step.
            drawn_rows: as in `lay_out`.
            num_columns: of the block tables; those that the step uses, if not given.

        Raises:
            KeyError: a token is known neither to the host nor to the previous step.
        """
        rows, padding, drafts = batch.rows, batch.padding, batch.drafts
        slots = [self._slots[row] for row in rows]
        token_ids = _token_ids(rows, slots, drawn_rows or {}, drafts) + [PADDING] * batch.num_padding_tokens
        starts = [row.start for row in rows] + [row.context_len - row.num_tokens for row in padding]
        num_drafts = [len(drafts.get(row.sequence_id, ())) for row in rows] if drafts else [0] * len(rows)
        sizes = [row.num_tokens + count for row, count in zip(rows, num_drafts, strict=True)]
        sizes += [row.num_tokens for row in padding]
        # A rectangle of decodes computes the logits of its finished rows as well.
        samples = [row.samples for row in rows] + [row.num_tokens == 1 for row in padding]
        lengths = np.array(sizes, dtype=np.int32)
        ends = lengths.cumsum(dtype=np.int32)
        context_lens = np.array(starts, dtype=np.int32) + lengths
        locs = np.concatenate((np.zeros(1, dtype=np.int32), ends))
        logit_rows = _with_drafts(ends[samples], samples, num_drafts) if drafts else (ends - 1)[samples]
        if batch.reads:
            logit_rows = np.array(kept_rows(batch, self._slots).rows, dtype=np.int32)
        max_context_len = int(context_lens.max())
        if num_columns is None:
            num_columns = columns_of(max_context_len, self._block_size, is_aligned=len(self._window_tables) > 0)
        return HostPlan(
            np.array(token_ids, dtype=np.int32),
            locs,
            context_lens,
            logit_rows,
            *self._used_tables(rows, slots, len(padding), num_columns),
            max_query_len=int(lengths.max()),
            max_context_len=max_context_len,
        )

    def _lay_out_decodes(self, rows: tuple[ScheduledRow, ...], slots: list[Slot]) -> StepInputs:
        """Lay out decodes whose tokens the host knows, in preallocated memory and in plain Python.

        A dozen operations over arrays of a few numbers take a tenth of such a step, because the weights evict numpy's
        and torch's code from the processor's caches.
        """
        size = self._block_size
        tables, window_tables = self._block_tables(rows, slots)
        if len(self._decodes.slots) != len(rows):
            self._decodes = _Decodes(tables, window_tables)
        starts = [row.start for row in rows]
        self._decodes.input_ids[:] = [slot.token_ids[start] for slot, start in zip(slots, starts, strict=True)]
        self._decodes.positions[:] = starts
        self._decodes.context_lens[:] = [start + 1 for start in starts]
        self._decodes.slots[:] = [
            tables.item(row, start // size) * size + start % size for row, start in enumerate(starts)
        ]
        for table, window_slots in zip(window_tables, self._decodes.window_slots, strict=True):
            window_slots[:] = [table.item(row, start // size) * size + start % size for row, start in enumerate(starts)]
        return self._decodes.inputs(max(starts) + 1)

    def _used_tables(
        self, rows: tuple[ScheduledRow, ...], slots: list[Slot], num_padding: int, num_columns: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the first columns of the tables of the rows and of padding.

        Tables are as long as the longest sequence may become: most columns are unused.
        """
        tables, window_tables = self._block_tables(rows, slots)
        tables, window_tables = tables[:, :num_columns], window_tables[..., :num_columns]
        if num_padding:
            of_padding = self._tables_of_padding(num_padding)[:, :num_columns]
            tables = np.concatenate((tables, of_padding))
            more = np.broadcast_to(of_padding, (len(window_tables), *of_padding.shape))
            window_tables = np.concatenate((window_tables, more), axis=1)
        return tables, window_tables

    def _to_device(self, plan: HostPlan) -> tuple[StepPlan, Tensor]:
        """Copy the plan to the device in one copy; return it there, and the logits' rows."""
        if self._device.type == "cpu":
            return step_plan([torch.from_numpy(array) for array in plan.arrays])
        return step_plan(self._staging.send(plan.arrays))

    def _block_tables(
        self, rows: tuple[ScheduledRow, ...], slots: list[Slot]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the tables of the rows, `[S, max_blocks]` and `[W, S, max_blocks]` of window groups.

        One is copied only if it grew or is another's.
        """
        for number, slot in enumerate(slots):
            copied, num_copied = self._rows[number]
            num_blocks = slot.num_blocks
            if copied is not slot or num_copied != num_blocks:
                first = num_copied if copied is slot else 0
                self._tables[number, first:num_blocks] = self._slots.tables[rows[number].slot, first:num_blocks]
                if len(self._window_tables):
                    windowed = self._slots.window_tables[:, rows[number].slot, first:num_blocks]
                    self._window_tables[:, number, first:num_blocks] = windowed
                self._rows[number] = slot, num_blocks
        return self._tables[: len(slots)], self._window_tables[:, : len(slots)]

    def _tables_of_padding(self, num_rows: int) -> NDArray[np.int32]:
        """Block tables of rows that read the cache's blocks in sequence, as far apart as those of real rows."""
        if len(self._padding_tables) < num_rows:
            # A recording has one row more than sequences may run.
            most, width = self._tables.shape
            shape = max(num_rows, most + 1), width
            blocks = np.arange(shape[0] * width).reshape(shape)
            self._padding_tables = (blocks % self._num_blocks).astype(np.int32)
        return self._padding_tables[:num_rows]


def columns_of(max_context_len: int, block_size: int, *, is_aligned: bool) -> int:
    """Return the columns of block tables for contexts of this length; with `is_aligned`, for window groups."""
    num_columns = -(-max_context_len // block_size)
    return -(-num_columns // ALIGNED_COLUMNS) * ALIGNED_COLUMNS if is_aligned else num_columns


def step_plan(parts: Sequence[Tensor]) -> tuple[StepPlan, Tensor]:
    """Return a `HostPlan`'s arrays, which are on the device now, by name, and the logits' rows."""
    token_ids, query_start_locs, context_lens, logit_rows, block_tables, *windowed = parts
    plan = StepPlan(
        token_ids=token_ids,
        query_start_locs=query_start_locs,
        context_lens=context_lens,
        block_tables=block_tables,
        window_tables=windowed[0] if windowed else None,
    )
    return plan, logit_rows


def tensors_of(
    plan: StepPlan, tokens: PreparedTokens, logit_rows: Tensor, max_query_len: int, max_context_len: int
) -> StepInputs:
    """Return the model's inputs: the plan, and the tensors prepared from it."""
    return StepInputs(
        input_ids=tokens.input_ids,
        positions=tokens.positions,
        slot_mapping=tokens.slot_mapping,
        block_tables=plan.block_tables,
        query_start_locs=plan.query_start_locs,
        context_lens=plan.context_lens,
        logit_rows=logit_rows.long(),
        max_query_len=max_query_len,
        max_context_len=max_context_len,
        window_slots=tokens.window_slots,
        window_tables=plan.window_tables,
    )


def _are_decodes(rows: tuple[ScheduledRow, ...], slots: list[Slot]) -> bool:
    """Whether each of some rows has one token, known to the host, and samples the next."""
    return bool(rows) and all(
        num_tokens == 1 and samples and start < len(slot.token_ids)
        for (_, _, start, num_tokens, samples), slot in zip(rows, slots, strict=True)
    )


def _with_drafts(ends: NDArray[np.int32], samples: list[bool], num_drafts: list[int]) -> NDArray[np.int32]:
    """Return the rows of logits of those that sample, whose tokens end at `ends`: the last, and one for each draft.

    Only sequences have drafts: padding, after them, is not in `num_drafts`.
    """
    counts = [count for count, is_sampling in zip(num_drafts, samples, strict=False) if is_sampling]
    counts += [0] * (len(ends) - len(counts))
    rows = [row for end, count in zip(ends.tolist(), counts, strict=True) for row in range(end - 1 - count, end)]
    return np.array(rows, dtype=np.int32)


def _token_ids(
    rows: tuple[ScheduledRow, ...], slots: list[Slot], drawn_rows: Mapping[int, int], drafts: Drafts
) -> list[int]:
    """Return the ids of all tokens; where only the previous step knows one, its row there as `StepPlan` defines."""
    token_ids: list[int] = []
    for (_, sequence_id, start, num_tokens, _), slot in zip(rows, slots, strict=True):
        if start == len(slot.token_ids):
            token_ids.append(-1 - drawn_rows[sequence_id])
        else:
            token_ids += slot.token_ids[start : start + num_tokens]
            if drafts:
                token_ids += drafts.get(sequence_id, ())
    return token_ids
