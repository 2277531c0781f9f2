"""The inputs of recorded steps at fixed addresses: one copy fills them, and the recording computes the rest of them.

What a step needs is laid out in one memory by the sizes of its bucket, as `transfers.places` lays it out. The tokens
that the previous step drew are copied on the device.
"""

from math import prod

import numpy as np
import torch
from torch import Tensor

from sluice.engine.execution.layout import HostPlan, columns_of, step_plan, tensors_of
from sluice.engine.execution.recordings.buckets import Bucket
from sluice.engine.execution.transfers import Staging, places, views
from sluice.engine.executor import ModelLimits
from sluice.kernels.decoder_step import StepInputs
from sluice.kernels.prepare_batch import prepare_batch

DENSE_COLUMNS = 128
"""Widest tables that are sent as wide as a recording reads them; of wider ones the columns in use are sent."""

_NUM_OF_ROWS = 4
"""Arrays of a plan before its tables."""


class RecordedInputs:
    """The memory of all recordings' inputs. Mutable: a step overwrites it."""

    def __init__(
        self, limits: ModelLimits, *, max_tokens: int, max_rows: int, max_drawn: int, device: torch.device
    ) -> None:
        """Allocate the memory.

        Args:
            limits: of the model and its cache.
            max_tokens: of a recorded step.
            max_rows: of a recorded step.
            max_drawn: tokens that a step may draw, recorded or not.
            device: where the model is.
        """
        self._limits = limits
        self._staging = Staging(device)
        _, num_words = places(self._shapes(Bucket(max_tokens, max_rows, max_tokens, limits.max_model_len)))
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._last_ids = torch.zeros(max_drawn, dtype=torch.int64, device=device)
        """The tokens that the previous step drew."""

    def sent_columns(self, bucket: Bucket) -> int | None:
        """Return the columns of the block tables that a plan of a bucket's sizes has; None: those in use."""
        num_columns = self._num_columns(bucket)
        return num_columns if num_columns <= DENSE_COLUMNS else None

    def _num_columns(self, bucket: Bucket) -> int:
        return columns_of(bucket.max_context_len, self._limits.block_size, is_aligned=self._limits.window_groups > 0)

    def fill(self, plan: HostPlan, bucket: Bucket, last_ids: Tensor | None) -> None:
        """Copy a step of a bucket's sizes, after all work launched on the device.

        Args:
            plan: with `sent_columns`; it may have fewer logits' rows.
            bucket: its sizes.
            last_ids: `[R]` int64, the tokens that the previous step drew; None if the step needs none.
        """
        logit_rows = np.zeros(bucket.num_rows, dtype=np.int32)
        logit_rows[: len(plan.logit_rows)] = plan.logit_rows
        arrays = plan._replace(logit_rows=logit_rows).arrays
        if self.sent_columns(bucket) is not None:
            self._staging.fill(self._words, arrays)
        else:
            rows, tables = arrays[:_NUM_OF_ROWS], arrays[_NUM_OF_ROWS:]
            self._staging.fill(self._words, rows)
            places_of_tables = views(self._words, self._shapes(bucket))[_NUM_OF_ROWS:]
            for place, sent in zip(places_of_tables, self._staging.send(tables), strict=True):
                place[..., : sent.shape[-1]].copy_(sent)
        if last_ids is not None:
            self._last_ids[: len(last_ids)].copy_(last_ids)

    def tensors(self, bucket: Bucket) -> StepInputs:
        """Compute the model's inputs of the step that was filled in; may be recorded."""
        plan, logit_rows = step_plan(views(self._words, self._shapes(bucket)))
        block_size = self._limits.block_size
        spare_slot = self._limits.num_blocks * block_size
        tokens = prepare_batch(plan, self._last_ids, block_size=block_size, spare_slot=spare_slot)
        return tensors_of(plan, tokens, logit_rows, bucket.max_query_len, bucket.max_context_len)

    def _shapes(self, bucket: Bucket) -> list[tuple[int, ...]]:
        """Return the shapes of a plan's arrays."""
        num_rows, num_columns = bucket.num_rows, self._num_columns(bucket)
        shapes: list[tuple[int, ...]] = [(bucket.num_tokens,), (num_rows + 1,), (num_rows,), (num_rows,)]
        shapes.append((num_rows, num_columns))
        windowed = (self._limits.window_groups, num_rows, num_columns)
        return [*shapes, windowed] if prod(windowed) else shapes
