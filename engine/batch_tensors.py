"""Lay a step out as tensors: what the decoder reads. Knows no model.

Hot: one pass of Python per sequence, no tensor per sequence; the rest is arithmetic over the whole batch.

Padding comes after the sequences, as rows like theirs: it attends to as many tokens as a padded row would, whatever is
there, and writes to the block after the cache's last, which no sequence has.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, PaddingRow, ScheduledSequence
from engine.transfers import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Input ids that the host does not know: those that the step before drew."""

    tokens: Tensor
    """`[F]` int64: which of the T tokens."""

    rows: Tensor
    """`[F]` int64: the row that drew each, among those of the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensors:
    """One step: T tokens of S sequences, R of which draw a token."""

    input_ids: Tensor
    """`[T]` int64; 0 where it comes from the step before."""

    positions: Tensor
    """`[T]` int64."""

    slot_mapping: Tensor
    """`[T]` int64: where each token's key and value go."""

    block_tables: Tensor
    """`[S, max_blocks]` int32."""

    query_start_locs: Tensor
    """`[S + 1]` int32."""

    context_lens: Tensor
    """`[S]` int32: tokens with this step's."""

    logit_rows: Tensor
    """`[R]` int64: rows of T whose logits are wanted, in batch order; those of padding last."""

    max_query_len: int
    max_context_len: int
    feed: Feed | None = None
    """None where the host knows all ids."""


class BatchLayout:
    """Lays steps out. Keeps the block tables of the last step: most rows are the same in the next."""

    def __init__(
        self, *, max_num_seqs: int, max_blocks_per_seq: int, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._device = device
        self._tables = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        self._rows: list[list[int]] = [[] for _ in range(max_num_seqs)]

    def lay_out(self, batch: Batch, drawn_rows: Mapping[int, int] | None = None) -> BatchTensors:
        """The tensors of `batch`, valid until the next call.

        Args:
            batch: the step.
            drawn_rows: by sequence id, the rows that drew tokens in the step before.

        Raises:
            KeyError: a token is known neither to the host nor to the step before.
        """
        scheduled, padding = batch.sequences, batch.padding
        input_ids, feed = self._inputs(scheduled, drawn_rows or {})
        num_tokens = len(input_ids)
        starts = [item.start for item in scheduled] + [row.context_len - row.num_tokens for row in padding]
        sizes = [item.num_tokens for item in scheduled] + [row.num_tokens for row in padding]
        # A rectangle of decodes has its finished rows' logits computed as well.
        samples = [item.samples for item in scheduled] + [row.num_tokens == 1 for row in padding]
        lengths = np.array(sizes, dtype=np.int64)
        tables = self._block_tables([item.sequence.block_table for item in scheduled])
        if padding:
            input_ids += [0] * batch.num_padding_tokens
            tables = np.concatenate((tables, self._padding_tables(padding)))
        ends = lengths.cumsum()
        row_of_token = np.repeat(np.arange(len(sizes)), lengths)
        context_lens = np.array(starts, dtype=np.int64) + lengths
        positions = np.arange(len(input_ids)) - (ends - context_lens)[row_of_token]
        slots = self._slots(tables, row_of_token, positions)
        slots[num_tokens:] = self._num_blocks * self._block_size
        return BatchTensors(
            input_ids=self._to_device(np.array(input_ids, dtype=np.int64)),
            positions=self._to_device(positions),
            slot_mapping=self._to_device(slots),
            block_tables=self._to_device(tables),
            query_start_locs=self._to_device(np.concatenate(([0], ends)).astype(np.int32)),
            context_lens=self._to_device(context_lens.astype(np.int32)),
            logit_rows=self._to_device((ends - 1)[samples]),
            max_query_len=int(lengths.max()),
            max_context_len=int(context_lens.max()),
            feed=feed,
        )

    def _inputs(
        self, scheduled: tuple[ScheduledSequence, ...], drawn_rows: Mapping[int, int]
    ) -> tuple[list[int], Feed | None]:
        """The ids of all tokens, and where those come from that the host does not know."""
        input_ids: list[int] = []
        fed: list[tuple[int, int]] = []
        for sequence, start, num_tokens, _ in scheduled:
            if start == len(sequence.token_ids):
                fed.append((len(input_ids), drawn_rows[sequence.id]))
                input_ids.append(0)
            else:
                input_ids += sequence.token_ids[start : start + num_tokens]
        if not fed:
            return input_ids, None
        tokens, rows = np.array(fed, dtype=np.int64).T.copy()
        return input_ids, Feed(tokens=self._to_device(tokens), rows=self._to_device(rows))

    def _block_tables(self, tables: list[list[int]]) -> NDArray[np.int32]:
        """The tables as rows `[S, max_blocks]`; a row is written only if it changed."""
        for row, table in enumerate(tables):
            if self._rows[row] != table:
                self._tables[row, : len(table)] = table
                self._rows[row] = table.copy()
        return self._tables[: len(tables)]

    def _padding_tables(self, padding: tuple[PaddingRow, ...]) -> NDArray[np.int32]:
        """Tables of rows that read the cache's blocks one after the other, as far from each other as real rows' are."""
        width = self._tables.shape[1]
        blocks = np.arange(len(padding))[:, None] * width + np.arange(width)
        return (blocks % self._num_blocks).astype(np.int32)

    def _slots(
        self, tables: NDArray[np.int32], row_of_token: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        blocks = tables[row_of_token, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        return to_device(array, self._device)
