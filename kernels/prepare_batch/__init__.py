"""Compute each token's id, position and slot from the host's plan by sequence.

The host sends one copy of small integers. Everything that is long, or known only to the device (tokens that the
previous step samples while this one is planned), is computed on the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.kernels.chain import Path, path_of
from sluice.kernels.checks import check, check_rows

__all__ = ["PADDING", "PreparedTokens", "StepPlan", "prepare_batch"]

PADDING = -(2**31)
"""In place of a token id: a padding token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The parts of S sequences in a step, all int32 and on the device, usually views of one buffer."""

    token_ids: Tensor
    """`[T]`: the token's id; `-1 - r` for the token sampled in row r of the previous step; or `PADDING`."""

    query_start_locs: Tensor
    """`[S + 1]`, ascending from 0: token ranges of the sequences."""

    context_lens: Tensor
    """`[S]`: context length of each sequence; this step's tokens are its last."""

    block_tables: Tensor
    """`[S, max_blocks]`; rows may be strided."""

    window_tables: Tensor | None = None
    """`[W, S, max_blocks]`: further tables of the same sequences; None if there are none."""


@dataclass(frozen=True, slots=True)
class PreparedTokens:
    """Per-token inputs of the model: `[T]` int64 each."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    window_slots: Tensor | None = None
    """`[W, T]`: as `slot_mapping`, by each of `window_tables`."""


def prepare_batch(plan: StepPlan, drawn_ids: Tensor | None, *, block_size: int, spare_slot: int) -> PreparedTokens:
    """Compute ids, positions and slots of all tokens.

    A sampled id below 0 (a row that failed) becomes 0: its result is discarded. A padding token has id 0, its position,
    and the spare slot. Tokens after the last sequence's have id 0, position 0 and slot -1.

    Args:
        plan: see `StepPlan`.
        drawn_ids: `[R]` int64, of the previous step; None if the host knows every id.
        block_size: token slots of a block.
        spare_slot: slot for keys and values of padding, which is never read.

    Raises:
        ValueError: shapes or dtypes disagree.
    """
    parts = (plan.token_ids, plan.query_start_locs, plan.context_lens, plan.block_tables)
    check(all(part.dtype == torch.int32 for part in parts), "a plan must be int32")
    num_sequences = plan.context_lens.shape[0]
    check(plan.query_start_locs.shape == (num_sequences + 1,), "query_start_locs must be [S + 1]")
    check(plan.block_tables.dim() == 2 and plan.block_tables.shape[0] == num_sequences, "block_tables must be [S, …]")
    check_rows("block_tables", plan.block_tables)
    if plan.window_tables is not None:
        check(plan.window_tables.dtype == torch.int32, "a plan must be int32")
        check(plan.window_tables.shape[1:] == plan.block_tables.shape, "window_tables must be [W, S, max_blocks]")
        check_rows("window_tables", plan.window_tables)
    check(drawn_ids is None or drawn_ids.dtype == torch.int64, "drawn_ids must be int64")
    # A GPU computes them in one launch. On the CPU it is arithmetic over whole arrays, where numpy is as fast.
    path = path_of("prepare_batch", plan.token_ids)
    if path is Path.TRITON:
        from sluice.kernels.prepare_batch.kernel import prepare_batch_triton as prepare
    elif path is Path.TORCH:
        from sluice.kernels.prepare_batch.cpu import prepare_batch_torch as prepare
    else:
        from sluice.kernels.prepare_batch.cpu import prepare_batch_cpu as prepare
    return prepare(plan, drawn_ids, block_size=block_size, spare_slot=spare_slot)
