"""What each token of a step is, from what the host plans by sequence: its id, its position, where its key goes.

The host sends one copy of small integers; everything that is long, or that only the device knows (the tokens that the
step before draws while this one is planned), is made where it is needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import check, check_rows

__all__ = ["PADDING", "PreparedTokens", "StepPlan", "prepare_batch"]

PADDING = -(2**31)
"""Instead of a token id: a token that nobody asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """S sequences' parts of a step, all int32 and on the device; most likely views of one buffer."""

    token_ids: Tensor
    """`[T]`: the token's id; `-1 - r` for what row r of the step before drew; or `PADDING`."""

    query_start_locs: Tensor
    """`[S + 1]`, ascending from 0: which of the tokens are each sequence's."""

    context_lens: Tensor
    """`[S]`: tokens of each sequence, with this step's, which are its last."""

    block_tables: Tensor
    """`[S, max_blocks]`; rows may be strided."""


@dataclass(frozen=True, slots=True)
class PreparedTokens:
    """What the model reads of each token: `[T]` int64 each."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor


def prepare_batch(plan: StepPlan, drawn_ids: Tensor | None, *, block_size: int, spare_slot: int) -> PreparedTokens:
    """Make ids, positions and slots of all tokens.

    A drawn id below 0 (a row that failed) becomes 0: whatever comes of it is thrown away. A token of padding has id 0,
    its position, and the spare slot. Tokens after the last sequence's have id 0, position 0 and slot -1.

    Args:
        plan: see `StepPlan`.
        drawn_ids: `[R]` int64, of the step before; None where the host knows every id.
        block_size: token slots of a block.
        spare_slot: where keys and values of padding go, which nobody reads.

    Raises:
        ValueError: shapes or dtypes disagree.
    """
    parts = (plan.token_ids, plan.query_start_locs, plan.context_lens, plan.block_tables)
    check(all(part.dtype == torch.int32 for part in parts), "a plan must be int32")
    num_sequences = plan.context_lens.shape[0]
    check(plan.query_start_locs.shape == (num_sequences + 1,), "query_start_locs must be [S + 1]")
    check(plan.block_tables.dim() == 2 and plan.block_tables.shape[0] == num_sequences, "block_tables must be [S, …]")
    check_rows("block_tables", plan.block_tables)
    check(drawn_ids is None or drawn_ids.dtype == torch.int64, "drawn_ids must be int64")
    # A card makes them in one launch. On the CPU it is arithmetic over whole arrays, at which numpy is as quick.
    if plan.token_ids.is_cuda:
        from kernels.prepare_batch.kernel import prepare_batch_triton as prepare
    else:
        from kernels.prepare_batch.cpu import prepare_batch_cpu as prepare
    return prepare(plan, drawn_ids, block_size=block_size, spare_slot=spare_slot)
