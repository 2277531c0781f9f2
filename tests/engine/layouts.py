"""Layouts of steps outside any engine: parts of sequences, which are admitted with each step."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sluice.engine.batch import Batch
from sluice.engine.execution.layout import BatchLayout
from sluice.engine.execution.slots import Slots
from sluice.engine.sequence import Sequence, batch_of
from sluice.kernels.decoder_step import StepInputs

Part = tuple[Sequence, int, int, bool]
"""A sequence, with `start`, `num_tokens` and `samples` of its row."""


class StepLayout:
    """A layout on the CPU, and the slots that it reads."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        num_blocks: int,
        block_size: int,
        window_groups: int = 0,
    ) -> None:
        self.slots = Slots(num_slots=max_num_seqs, max_blocks_per_seq=max_blocks_per_seq, window_groups=window_groups)
        self.layout = BatchLayout(
            self.slots,
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
            block_size=block_size,
            device=torch.device("cpu"),
        )

    def lay_out(
        self, parts: Iterable[Part], drawn_rows: Mapping[int, int] | None = None, drawn_ids: Tensor | None = None
    ) -> StepInputs:
        """The tensors of a step of `parts`."""
        return self.lay_out_batch(batch_of(parts), drawn_rows, drawn_ids)

    def lay_out_batch(
        self, batch: Batch, drawn_rows: Mapping[int, int] | None = None, drawn_ids: Tensor | None = None
    ) -> StepInputs:
        """The tensors of `batch`, after its writes."""
        self.slots.write(batch)
        return self.layout.lay_out(batch, drawn_rows, drawn_ids)
